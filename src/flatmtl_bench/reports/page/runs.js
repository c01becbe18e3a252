// All values of the run that is chosen.
const SETTINGS = JSON.parse(document.getElementById("settings").textContent);

function row(name, value, apart) {
  const line = document.createElement("tr"), cells = [document.createElement("th"), document.createElement("td")];
  cells[0].scope = "row";
  cells[0].textContent = name;
  cells[1].append(apart ? Object.assign(document.createElement("strong"), {textContent: value}) : value);
  line.append(...cells);
  return line;
}

function heading(text) {
  const line = document.createElement("tr"), cell = document.createElement("th");
  Object.assign(cell, {textContent: text, colSpan: 2, scope: "rowgroup", className: "part"});
  line.append(cell);
  return line;
}

function show() {
  const run = SETTINGS.runs[document.getElementById("run").value], lines = [];
  let before = "";
  for (const full of SETTINGS.order) {
    const apart = full in run.values;
    if (!apart && !(full in SETTINGS.common)) continue;
    const [part, name] = full.split(": ");
    if (part !== before) lines.push(heading(part));
    lines.push(row(name, apart ? run.values[full] : SETTINGS.common[full], apart));
    before = part;
  }
  document.getElementById("values").replaceChildren(...lines);
}

if (SETTINGS.runs.length) {
  document.getElementById("run").addEventListener("change", show);
  show();
}

// Tables: a heading sorts by its column; up, down, and back to the order of the report.
const FOLLOWING = {none: "ascending", ascending: "descending", descending: "none"};

// By numbers where the column has any, else by texts; what has no number (failed, "-") stands last either way.
function compared(cells, direction) {
  const sign = direction === "ascending" ? 1 : -1;
  if (!cells.some(cell => "value" in cell.dataset)) {
    const text = cell => cell.querySelector("span, strong").textContent;
    return (a, b) => sign * text(a).localeCompare(text(b), "en", {numeric: true});
  }
  const number = cell => "value" in cell.dataset ? Number(cell.dataset.value) : null;
  return (a, b) => {
    const [x, y] = [number(a), number(b)];
    return x === null || y === null ? (x === null) - (y === null) : sign * (x - y);
  };
}

for (const table of document.querySelectorAll(".sortable")) {
  const body = table.tBodies[0], rows = [...body.rows], headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => heading.firstElementChild.addEventListener("click", () => {
    const direction = FOLLOWING[heading.ariaSort];
    headings.forEach(other => { other.ariaSort = other === heading ? direction : "none"; });
    const compare = compared(rows.map(row => row.cells[column]), direction);
    const order = direction === "none" ? rows : [...rows].sort((a, b) => compare(a.cells[column], b.cells[column]));
    body.append(...order);
    table.classList.toggle("unsorted", direction === "none");
  }));
}

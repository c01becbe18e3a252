// Curves: what is drawn follows from what is chosen.
const CURVES = JSON.parse(document.getElementById("curves").textContent);
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The mean of each epoch, where all seeds have a value.
function mean(seeds) {
  const last = Math.max(...seeds.map(seed => seed.length));
  return Array.from({length: last}, (_, epoch) => {
    const values = seeds.map(seed => seed[epoch] ?? null);
    return values.includes(null) ? null : values.reduce((a, b) => a + b) / values.length;
  });
}

// The methods and seeds that are chosen and have the metric: [{method, seeds: [{seed, values}]}].
function chosen(chart, data, metric) {
  return [...chart.querySelectorAll("li")].flatMap((item, m) => {
    if (!item.querySelector(".method").checked) return [];
    const method = data.methods[m], runs = [...item.querySelectorAll(".run")];
    const seeds = runs.flatMap((run, s) => {
      const values = method.curves[s][metric];
      return run.checked && values ? [{seed: method.seeds[s], values}] : [];
    });
    return seeds.length ? [{method, seeds}] : [];
  });
}

// Plotly reads some HTML in texts, and numbers in %{}.
function plain(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll("%{", "% {");
}

function trace(name, values, look, unit, thick, quiet) {
  const color = style(`--hue-${look.hue}`);
  return {
    name, x: values.map((_, epoch) => epoch + 1), y: values, showlegend: false, opacity: thick ? 1 : 0.5,
    mode: values.length === 1 || (thick && look.symbol) ? "lines+markers" : "lines",
    line: {color, width: thick ? 2.5 : 1, dash: look.flat ? "solid" : thick ? "6px,4px" : "3px,3px"},
    marker: {color, size: 8, symbol: look.symbol || "circle", maxdisplayed: 12},
    ...(quiet ? {hoverinfo: "skip"} : {hovertemplate: `%{y:.4g}${unit} ${plain(name)}<extra></extra>`}),
  };
}

function traces(methods, unit, single) {
  const many = methods.length > 8;
  const thin = single ? methods.flatMap(({method, seeds}) => seeds.map(({seed, values}) =>
    trace(`${method.name}, seed ${seed}`, values, method.look, unit, false, !many))) : [];
  return [...thin, ...methods.map(({method, seeds}) =>
    trace(method.name, mean(seeds.map(seed => seed.values)), method.look, unit, true, false))];
}

// From the lowest to the highest value after the first quarter of the epochs, so that the end can be told apart.
function height(drawn) {
  const values = drawn.flatMap(({y}) => y.slice(y.length / 4)).filter(value => value !== null);
  if (!values.length) return {};
  const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  const room = 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
  return {range: [low - room, high + room]};
}

function layout(metric, drawn, late, many) {
  const grid = {gridcolor: style("--line"), linecolor: style("--line"), zeroline: false, automargin: true, fixedrange: true};
  const font = {color: style("--text"), family: "system-ui, sans-serif", size: 13};
  const longest = Math.max(1, ...drawn.map(({x}) => x.length));
  const room = longest > 1 ? 0.01 * longest : 0.5;
  const narrow = innerWidth < 600; // the choice above says what it is
  const empty = {text: "no curve is chosen", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5};
  return {
    font, margin: {l: 48, r: 12, t: 12, b: 44}, paper_bgcolor: style("--card"), plot_bgcolor: style("--card"),
    hovermode: many ? "closest" : "x unified",
    hoverlabel: {font, bgcolor: style("--card"), bordercolor: style("--line"), namelength: -1},
    xaxis: {
      ...grid, title: {text: "epoch"}, tickformat: "d", ...(longest > 12 ? {nticks: 12} : {tick0: 1, dtick: 1}), range: [1 - room, longest + room],
      unifiedhovertitle: {text: "epoch %{x}"}, spikecolor: style("--soft"), spikethickness: 1, spikedash: "dot",
    },
    yaxis: {
      ...grid, title: {text: narrow ? "" : `${metric.part}: ${metric.title}`},
      ...(late ? height(drawn) : {autorange: true}),
    },
    annotations: drawn.length ? [] : [empty],
  };
}

function draw(chart) {
  const data = CURVES[chart.dataset.section], index = Number(chart.querySelector(".metric").value);
  const metric = data.metrics[index], plot = chart.querySelector(".plot");
  const methods = chosen(chart, data, index), many = methods.length > 8;
  const drawn = traces(methods, metric.unit, chart.querySelector(".single").checked);
  plot.setAttribute("aria-label", `${metric.part}: ${metric.title} over the epochs, ${methods.length} methods`);
  const late = chart.querySelector(".late").checked;
  Plotly.react(plot, drawn, layout(metric, drawn, late, many), {displayModeBar: false, responsive: true});
}

const CHARTS = [...document.querySelectorAll(".chart")];
for (const chart of CHARTS) {
  const methods = [...chart.querySelectorAll(".method")];
  chart.addEventListener("change", event => {
    if (event.target.matches(".method")) allow(event.target);
    draw(chart);
  });
  for (const button of chart.querySelectorAll("[data-which]")) {
    button.addEventListener("click", () => {
      const which = button.dataset.which;
      for (const method of methods) {
        const flat = method.dataset.flat === "1";
        method.checked = which === "all" || (which === "flat" && flat) || (which === "plain" && !flat);
        allow(method);
      }
      draw(chart);
    });
  }
  methods.forEach(allow);
  draw(chart);
}

// The runs of a method that is hidden cannot be chosen.
function allow(method) {
  for (const run of method.closest("li").querySelectorAll(".run")) run.disabled = !method.checked;
}

// Colours are in the picture: it is drawn again for another scheme, and in light colours for paper.
for (const query of ["(prefers-color-scheme: dark)", "print"]) {
  matchMedia(query).addEventListener("change", () => CHARTS.forEach(draw));
}

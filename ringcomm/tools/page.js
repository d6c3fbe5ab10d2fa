// Draws the figures in the colors of the page, and again when the reader changes from light to dark.
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function themed(layout) {
  const line = color("--line");
  const narrow = window.innerWidth < 600;
  const own = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("--ink"), family: "system-ui, sans-serif", size: narrow ? 11 : 13 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: color("--soft"), activecolor: color("--ink") },
    legend: { orientation: "h", y: -0.25, yanchor: "top", maxheight: 4000 },
    hoverlabel: { bgcolor: color("--raised"), font: { color: color("--ink") } },
    margin: narrow ? { l: 50, r: 10, t: 40, b: 50 } : { l: 70, r: 20, t: 40, b: 60 },
  };
  const whole = { ...own, ...layout };
  for (const name of Object.keys(whole).filter((key) => /^[xy]axis/.test(key))) {
    whole[name] = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, ...whole[name] };
  }
  for (const name of ["xaxis", "yaxis"]) {
    whole[name] ??= { gridcolor: line, zerolinecolor: line, automargin: true };
  }
  return whole;
}

// Below the axis' labels and title there is room for the legend, however many lines it has: the figure
// grows by them, and its axes keep their height.
const AXIS = 64;

async function fit(place, figure, margin) {
  const legend = place.querySelector("g.legend");
  if (!legend || figure.layout.legend) return;  // it has a place of its own
  for (let turn = 0; turn < 2; turn++) {  // margins that grow may break its lines anew
    const height = legend.getBoundingClientRect().height;
    const plot = figure.layout.height - margin.t - AXIS - 24;
    const whole = margin.t + plot + AXIS + height + 4;
    place.style.height = `${whole}px`;
    const bottom = whole - margin.t - plot;
    await Plotly.relayout(place, { height: whole, "margin.b": bottom, "legend.y": -AXIS / plot });
  }
}

async function draw() {
  for (const place of document.querySelectorAll(".plot:not(.own)")) {
    const figure = JSON.parse(place.nextElementSibling.textContent);
    const options = { responsive: true, displaylogo: false, displayModeBar: window.innerWidth < 600 ? false : "hover" };
    const layout = themed(figure.layout);
    await Plotly.react(place, figure.data, layout, options);
    await fit(place, figure, layout.margin);
  }
}

drawers.push(draw);

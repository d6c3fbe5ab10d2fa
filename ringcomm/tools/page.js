// Draws the figures in the colours of the page, and again when the reader changes from light to dark.
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function themed(layout) {
  const line = colour("--line");
  const narrow = window.innerWidth < 600;
  const own = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--ink"), family: "system-ui, sans-serif", size: narrow ? 11 : 13 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: colour("--ink") },
    legend: { orientation: "h", y: -0.25, yanchor: "top" },
    hoverlabel: { bgcolor: colour("--raised"), font: { color: colour("--ink") } },
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

function draw() {
  for (const place of document.querySelectorAll(".plot")) {
    const figure = JSON.parse(place.nextElementSibling.textContent);
    const options = { responsive: true, displaylogo: false, displayModeBar: window.innerWidth < 600 ? false : "hover" };
    Plotly.react(place, figure.data, themed(figure.layout), options);
  }
}

draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

// Shows one frame at a time: by the slider, the buttons, the arrow keys, or one a second.
const every = [...document.querySelectorAll("#frames .frame")];
const part = (name) => document.getElementById(name);
const slider = part("round");
let timer = 0;

function show(number) {
  const now = Math.max(0, Math.min(every.length - 1, number));
  every.forEach((one, i) => { one.hidden = i !== now; });
  slider.value = now;
  part("where").textContent = now ? `round ${now} of ${every.length - 1}` : "start";
  part("messages").replaceChildren(...texts[now].map((text) => {
    const line = document.createElement("li");
    line.textContent = text;
    return line;
  }));
}

function stop() {
  clearInterval(timer);
  timer = 0;
  part("play").textContent = "play";
}

function play() {
  if (timer) return stop();
  if (Number(slider.value) === every.length - 1) show(0);
  part("play").textContent = "stop";
  timer = setInterval(() => {
    show(Number(slider.value) + 1);
    if (Number(slider.value) === every.length - 1) stop();
  }, 1000);
}

slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
part("back").addEventListener("click", () => { stop(); show(Number(slider.value) - 1); });
part("on").addEventListener("click", () => { stop(); show(Number(slider.value) + 1); });
part("play").addEventListener("click", play);
document.addEventListener("keydown", (event) => {
  if (event.target === slider) return;
  if (event.key === "ArrowRight") { stop(); show(Number(slider.value) + 1); }
  if (event.key === "ArrowLeft") { stop(); show(Number(slider.value) - 1); }
});
// A page with "#3" at its end opens at the third round, and with "#0" at the start.
show(Number(location.hash.slice(1) || slider.value));

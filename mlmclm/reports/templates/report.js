(() => {
  "use strict";
  const { specs, dark } = JSON.parse(document.getElementById("figures").textContent);
  // On paper it is always day: printing changes the answer, and then the figures are drawn again.
  const night = window.matchMedia("screen and (prefers-color-scheme: dark)");
  const hidden = new Set();
  const recolour = (value) => {
    if (typeof value === "string") return dark[value] ?? value;
    if (Array.isArray(value)) return value.map(recolour);
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, recolour(item)]));
    return value;
  };
  const draw = (place) => {
    const plain = specs[place.id];
    const spec = night.matches ? recolour(plain) : structuredClone(plain);
    for (const trace of spec.data) trace.visible = !hidden.has(trace.meta);
    const style = getComputedStyle(document.documentElement);
    spec.layout.hoverlabel = {
      bgcolor: style.getPropertyValue("--card"),
      bordercolor: style.getPropertyValue("--line"),
      font: { color: style.getPropertyValue("--ink") },
    };
    Plotly.react(place, spec.data, spec.layout, { displayModeBar: false, responsive: true });
  };
  const places = [...document.querySelectorAll(".plot")];
  const drawAll = () => places.forEach(draw);
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-model]");
    if (!button) return;
    const name = button.dataset.model;
    if (!hidden.delete(name)) hidden.add(name);
    for (const other of document.querySelectorAll("button[data-model]"))
      other.setAttribute("aria-pressed", String(!hidden.has(other.dataset.model)));
    drawAll();
  });
  night.addEventListener("change", drawAll);
  drawAll();
})();

// Shows a mark's words where the pointer or, by the arrow keys, the reader is, and brings its series out.
(() => {
  "use strict";
  const hover = document.body.appendChild(document.createElement("div"));
  hover.id = "hover";
  hover.setAttribute("role", "status");
  const words = new WeakMap();
  // The browser's own tooltip would come on top of this one.
  for (const title of document.querySelectorAll(".plot title")) {
    words.set(title.parentNode, title.textContent);
    title.remove();
  }
  const shown = (mark) => words.has(mark) && mark.getClientRects().length > 0;
  const marks = (chart) => [...chart.querySelectorAll("circle,rect,.cross")].filter(shown);
  const light = (place, number) => {
    place.classList.toggle("lit", number !== undefined);
    for (const each of place.querySelectorAll(".plot [data-m]")) each.classList.toggle("on", each.dataset.m === number);
  };
  let aim = null;
  const leave = () => {
    if (!aim) return;
    aim.classList.remove("aim");
    light(aim.closest(".plot"), undefined);
    aim = null;
    hover.textContent = "";
  };
  const show = (mark) => {
    if (mark === aim) return;
    leave();
    aim = mark;
    mark.classList.add("aim");
    light(mark.closest(".plot"), mark.closest("[data-m]")?.dataset.m);
    hover.textContent = words.get(mark);
    const box = mark.getBoundingClientRect(), width = document.documentElement.clientWidth;
    const left = Math.min(Math.max(8, box.left + box.width / 2 - hover.offsetWidth / 2), width - hover.offsetWidth - 8);
    const above = box.top - hover.offsetHeight - 10;
    hover.style.left = `${left + window.scrollX}px`;
    hover.style.top = `${(above > 0 ? above : box.bottom + 10) + window.scrollY}px`;
  };
  const nearest = (chart, x, y) => {
    let found = null, least = 24;
    for (const mark of marks(chart)) {
      const box = mark.getBoundingClientRect();
      const away = Math.hypot(
        Math.max(box.left - x, 0, x - box.right), Math.max(box.top - y, 0, y - box.bottom));
      if (away < least) [found, least] = [mark, away];
    }
    return found;
  };
  for (const chart of document.querySelectorAll(".plot>svg")) {
    const away = () => {
      if (chart.contains(aim)) leave();
    };
    const follow = (event) => {
      const mark = nearest(chart, event.clientX, event.clientY);
      if (mark) show(mark);
      else away();
    };
    chart.parentNode.addEventListener("pointermove", follow);
    chart.parentNode.addEventListener("pointerdown", follow);
    chart.parentNode.addEventListener("pointerleave", away);
    chart.addEventListener("blur", away);
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") leave();
      if (!step) return;
      event.preventDefault();
      const all = marks(chart), place = all.indexOf(aim);
      if (all.length) show(all[place < 0 ? (step > 0 ? 0 : all.length - 1) : (place + step + all.length) % all.length]);
    });
  }
  // A button of the legend hides a model in all figures; pointing at it brings the model out.
  const buttons = [...document.querySelectorAll("button[data-m]")];
  for (const button of buttons) {
    const number = button.dataset.m;
    button.disabled = false;
    button.addEventListener("click", () => {
      const off = button.getAttribute("aria-pressed") === "true";
      for (const each of buttons) if (each.dataset.m === number) each.setAttribute("aria-pressed", String(!off));
      for (const each of document.querySelectorAll(".plot [data-m]"))
        if (each.dataset.m === number) each.classList.toggle("off", off);
    });
    for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => light(document.body, number));
    for (const event of ["pointerleave", "blur"]) button.addEventListener(event, () => light(document.body, undefined));
  }
})();

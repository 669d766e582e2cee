"use strict";
// Adds to a page that is whole without it: values under the pointer, arrow keys in charts, series that come and go.
(() => {
  const tip = document.getElementById("tip");
  let told = null;

  const hide = () => {
    tip.hidden = true;
    if (told) told.classList.remove("told");
    told = null;
  };

  const tell = (mark) => {
    hide();
    told = mark;
    mark.classList.add("told");
    tip.textContent = mark.dataset.told;
    tip.hidden = false;
    const at = mark.getBoundingClientRect();
    const room = tip.getBoundingClientRect();
    const left = at.left + at.width / 2 - room.width / 2;
    tip.style.left = `${Math.max(8, Math.min(left, document.documentElement.clientWidth - room.width - 8))}px`;
    tip.style.top = `${at.top - room.height - 8 < 0 ? at.bottom + 8 : at.top - room.height - 8}px`;
  };

  for (const mark of document.querySelectorAll(".chart .mark")) {
    const title = mark.querySelector("title");
    mark.dataset.told = title.textContent;
    title.remove(); // or the browser would show it, too
    mark.addEventListener("pointerenter", () => tell(mark));
    mark.addEventListener("pointerleave", hide);
  }

  for (const chart of document.querySelectorAll(".chart")) {
    for (const button of chart.querySelectorAll(".legend button")) {
      button.disabled = false;
      button.addEventListener("click", () => {
        const shown = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(shown));
        hide();
        for (const series of chart.querySelectorAll(`g.series[data-series="${button.dataset.series}"]`)) {
          series.classList.toggle("off", !shown);
        }
      });
    }
    for (const drawing of chart.querySelectorAll(".wide > svg, .narrow > svg")) {
      drawing.setAttribute("tabindex", "0");
      drawing.addEventListener("blur", hide);
      drawing.addEventListener("keydown", (event) => {
        if (event.key === "Escape") hide();
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        const marks = [...drawing.querySelectorAll(".series:not(.off) .mark")];
        if (!marks.length) return;
        const place = marks.indexOf(told);
        tell(marks[place < 0 ? (step > 0 ? 0 : marks.length - 1) : (place + step + marks.length) % marks.length]);
      });
    }
  }

  window.addEventListener("scroll", hide, { passive: true });
  for (const hint of document.querySelectorAll(".hint")) hint.hidden = false;
})();

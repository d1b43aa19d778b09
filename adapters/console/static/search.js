// What JavaScript adds to the search page: dragging over the timeline.
"use strict";

(() => {
  const TIMES = ["start_time", "end_time"];

  // Dragging from one bar to another narrows the search to the time between them.
  for (const chart of document.querySelectorAll("[data-timeline]")) {
    const bars = [...chart.querySelectorAll("a[data-start]")];
    bars.forEach((bar, index) => { bar.tabIndex = index ? -1 : 0; }); // one stop, with arrows from bar to bar
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const bar = step && bars[bars.indexOf(document.activeElement) + step];
      if (!bar) { return; }
      event.preventDefault();
      document.activeElement.tabIndex = -1;
      bar.tabIndex = 0;
      bar.focus();
    });
    let first = null;
    let last = null;
    let wasDrag = false;

    const barOf = (event) => {
      const at = document.elementFromPoint(event.clientX, event.clientY);
      return at && at.closest("a[data-start]");
    };

    function mark() {
      const range = first && last ? [bars.indexOf(first), bars.indexOf(last)].sort((a, b) => a - b) : [1, 0];
      bars.forEach((bar, index) => bar.classList.toggle("in-range", index >= range[0] && index <= range[1]));
    }

    chart.addEventListener("dragstart", (event) => event.preventDefault());
    chart.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) { return; }
      first = last = barOf(event);
      wasDrag = false;
    });
    chart.addEventListener("pointermove", (event) => {
      const bar = first && barOf(event);
      if (!bar || bar === last) { return; }
      last = bar;
      wasDrag = wasDrag || last !== first;
      mark();
    });
    window.addEventListener("pointerup", () => {
      if (first && wasDrag) {
        const [from, to] = [first, last].sort((a, b) => bars.indexOf(a) - bars.indexOf(b));
        const target = new URL(from.getAttribute("href"), window.location.href);
        target.searchParams.set(TIMES[0], from.dataset.start);
        target.searchParams.set(TIMES[1], to.dataset.end);
        window.location.assign(target);
      }
      first = last = null;
      mark();
    });
    chart.addEventListener("click", (event) => { if (wasDrag) { event.preventDefault(); } });
  }
})();

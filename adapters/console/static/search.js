// What JavaScript adds to the search page: dragging over the timeline, and searches saved in this browser.
"use strict";

(() => {
  const TIMES = ["start_time", "end_time"];

  // Dragging from one bar to another narrows the search to the time between them.
  for (const chart of document.querySelectorAll("[data-timeline]")) {
    const bars = [...chart.querySelectorAll("a[data-start]")];
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

  // Saved searches: names and query strings, in this browser only.
  function keep(section) {
    const key = `postroom.searches.${section.dataset.saved}`;
    const list = section.querySelector("[data-saved-list]");
    const form = section.querySelector("[data-saved-form]");

    function read() {
      try {
        const stored = JSON.parse(window.localStorage.getItem(key) || "[]");
        return Array.isArray(stored) ? stored.filter((each) => each && typeof each.name === "string" && typeof each.query === "string") : [];
      } catch { return []; }
    }

    function write(searches) {
      window.localStorage.setItem(key, JSON.stringify(searches.slice(0, 100)));
      show();
    }

    function show() {
      list.replaceChildren(...read().map((each) => {
        const item = document.createElement("li");
        item.className = "chip";
        const link = document.createElement("a");
        link.textContent = each.name;
        link.href = `?${each.query}`;
        const remove = document.createElement("button");
        remove.type = "button";
        remove.textContent = "×";
        remove.setAttribute("aria-label", `Remove the saved search ${each.name}`);
        remove.addEventListener("click", () => write(read().filter((other) => other.name !== each.name)));
        item.append(link, remove);
        return item;
      }));
    }

    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const field = form.querySelector("input");
      const name = field.value.trim();
      if (!name) { return; }
      const query = new URLSearchParams(window.location.search);
      for (const paging of ["cursor", "back"]) { query.delete(paging); }
      write([...read().filter((each) => each.name !== name), { name, query: query.toString() }]);
      field.value = "";
    });
    section.hidden = false;
    show();
  }

  try {
    if (window.localStorage) { document.querySelectorAll("[data-saved]").forEach(keep); }
  } catch { /* a browser without storage has no saved searches */ }
})();

// What JavaScript adds: live parts, copies of ids, and keys. Every page works without it.
"use strict";

(() => {
  const FIELDS = ["INPUT", "SELECT", "TEXTAREA"];

  const MAX_ROWS = 200;

  // Live parts: server-sent events replace their contents, or add rows; the stream closes while the tab is hidden.
  function follow(part) {
    const state = document.getElementById(part.dataset.liveState);
    const pause = document.getElementById(part.dataset.pause);
    let source = null;
    let isOver = false;
    let isPaused = false;
    let seen = part.dataset.seen; // position of the log, of a part to which rows are added

    const tell = (text) => { if (state && state.textContent !== text) { state.textContent = text; } };
    const nameOf = (each) => each.getAttribute("aria-label") || each.getAttribute("href") || each.textContent.trim();

    // Changes the page by a function, and keeps the focus where it was.
    function keepFocus(element, change) {
      const focus = element.contains(document.activeElement) ? document.activeElement : null;
      if (focus && FIELDS.includes(focus.tagName)) { return; } // somebody types
      const label = focus && nameOf(focus);
      change();
      if (label && !document.contains(focus)) {
        const again = [...part.querySelectorAll("a, button, summary, [tabindex]")].find((each) => nameOf(each) === label);
        if (again) { again.focus({ preventScroll: true }); }
      }
    }

    // The server escapes all foreign text.
    function replaceAll(html) {
      keepFocus(part, () => {
        const scrolls = [...part.querySelectorAll(".table-frame")].map((each) => each.scrollLeft);
        const open = [...part.querySelectorAll("details[open] > summary")].map(nameOf);
        part.innerHTML = html;
        part.querySelectorAll("summary").forEach((each) => { each.parentElement.open ||= open.includes(nameOf(each)); });
        part.querySelectorAll(".table-frame").forEach((each, index) => { each.scrollLeft = scrolls[index] || 0; });
      });
    }

    // What changes by itself, in the order of the page.
    function replaceSome(changes) {
      const pieces = part.querySelectorAll("[data-p]");
      for (const [index, html] of changes) {
        keepFocus(pieces[index], () => { pieces[index].outerHTML = html; });
      }
    }

    // Rows that came, newest first. The URL of the page begins with the oldest that is shown.
    function addRows(html) {
      const rows = part.querySelector("[data-rows]");
      const last = () => rows.lastElementChild;
      if (html.trim()) {
        rows.querySelector("[data-placeholder]")?.remove();
        rows.insertAdjacentHTML("afterbegin", html);
      }
      while (rows.childElementCount > MAX_ROWS && !last().contains(document.activeElement)) { last().remove(); }
      const url = new URL(location.href);
      url.searchParams.set("after", Math.max(0, (last()?.dataset.position || Number(seen) + 1) - 1));
      history.replaceState(null, "", url);
    }

    function open() {
      if (source || isOver || isPaused || document.hidden) { return; }
      const url = new URL(part.dataset.live, location.href);
      if (seen) { url.searchParams.set("after", seen); }
      source = new EventSource(url);
      source.onopen = () => tell(part.dataset.liveText);
      source.addEventListener("live", (event) => {
        replaceAll(event.data);
        tell(part.dataset.liveText);
      });
      source.addEventListener("change", (event) => replaceSome(JSON.parse(event.data)));
      source.addEventListener("rows", (event) => {
        seen = event.lastEventId;
        addRows(event.data);
        tell(part.dataset.liveText);
      });
      source.addEventListener("problem", (event) => tell(event.data));
      source.addEventListener("end", (event) => {
        isOver = true;
        close();
        tell(`${event.data} Reload the page to go on.`);
      });
      source.onerror = () => {
        const isRefused = source.readyState === EventSource.CLOSED;
        tell(isRefused ? "Not live. Reload the page to go on." : "The connection is lost; trying again.");
      };
    }

    function close() {
      if (source) { source.close(); source = null; }
    }

    document.addEventListener("visibilitychange", () => {
      if (isOver || isPaused) { return; }
      if (document.hidden) { close(); tell("Paused while the tab is hidden"); } else { open(); }
    });
    if (pause) {
      pause.hidden = false;
      pause.addEventListener("click", () => {
        isPaused = !isPaused;
        pause.textContent = isPaused ? "Resume" : "Pause";
        close();
        if (isPaused) { tell(`Paused after position ${Number(seen).toLocaleString("en")}`); } else { open(); }
      });
    }
    window.addEventListener("pagehide", close);
    window.addEventListener("pageshow", open);
    open();
  }

  // The value under a pointer, at once; without scripts, browsers show the title after a while.
  document.addEventListener("pointerover", (event) => {
    const title = event.target.closest(".plot-hit")?.querySelector("title");
    const value = title?.closest(".chart-frame")?.querySelector("[data-plot-value]");
    if (value) { value.textContent = title.textContent; }
  });

  // Choices that are sent at once: <select data-submit>.
  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-submit]")) { event.target.form.requestSubmit(); }
  });

  // Parts that are loaded again by themselves are not while the tab is hidden.
  document.addEventListener("htmx:beforeRequest", (event) => {
    const trigger = event.detail.elt.getAttribute("hx-trigger") || "";
    if (document.hidden && trigger.startsWith("every")) { event.preventDefault(); }
  });

  // Buttons that copy: <button type="button" data-copy="text"> or data-copy-from="id of an element".
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy], [data-copy-from]");
    if (!button) { return; }
    const from = button.dataset.copyFrom && document.getElementById(button.dataset.copyFrom);
    const text = from ? (from.value ?? from.textContent) : button.dataset.copy;
    const label = button.textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select and copy it";
    }
    setTimeout(() => { button.textContent = label; }, 1500);
  });

  // Keys: / finds a message, g and a letter or digit opens a page of the navigation, p pauses a live tail, ? shows
  // the keys.
  let isGoing = false;
  document.addEventListener("keydown", (event) => {
    const isTyping = FIELDS.includes(event.target.tagName) || event.target.isContentEditable;
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey) { return; }
    const links = [...document.querySelectorAll(".nav a")];
    const target = links.find((each) => each.dataset.key === event.key) || links[Number(event.key) - 1];
    if (isGoing && target) {
      target.click();
    } else if (event.key === "/") {
      const field = document.querySelector("[data-search]");
      if (field) { event.preventDefault(); field.focus(); }
    } else if (event.key === "p") {
      document.getElementById("pause")?.click();
    } else if (event.key === "?") {
      document.getElementById("keys")?.togglePopover();
    }
    isGoing = event.key === "g";
  });

  for (const part of document.querySelectorAll("[data-live]")) { follow(part); }
})();

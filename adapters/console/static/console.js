// What JavaScript adds: live parts, copies of ids, and keys. Every page works without it.
"use strict";

(() => {
  const FIELDS = ["INPUT", "SELECT", "TEXTAREA"];

  // Live parts: server-sent events replace their contents; the stream closes while the tab is hidden.
  function follow(part) {
    const state = document.getElementById(part.dataset.liveState);
    let source = null;
    let isOver = false;

    const nameOf = (each) => each.getAttribute("aria-label") || each.getAttribute("href") || each.textContent.trim();
    const tell = (text) => { if (state) { state.textContent = text; } };

    function replace(html) {
      const focus = part.contains(document.activeElement) ? document.activeElement : null;
      if (focus && FIELDS.includes(focus.tagName)) { return; } // somebody types
      const label = focus && nameOf(focus);
      const open = new Set([...part.querySelectorAll("details[data-keep][open]")].map((each) => each.dataset.keep));
      const scrolls = [...part.querySelectorAll(".table-frame")].map((each) => each.scrollLeft);
      part.innerHTML = html; // the server escapes all foreign text
      for (const each of part.querySelectorAll("details[data-keep]")) { each.open = open.has(each.dataset.keep); }
      part.querySelectorAll(".table-frame").forEach((each, index) => { each.scrollLeft = scrolls[index] || 0; });
      if (label) {
        const again = [...part.querySelectorAll("a, button, summary, [tabindex]")].find((each) => nameOf(each) === label);
        if (again) { again.focus({ preventScroll: true }); }
      }
    }

    function open() {
      if (source || isOver || document.hidden) { return; }
      source = new EventSource(part.dataset.live);
      source.addEventListener("live", (event) => {
        replace(event.data);
        tell("Live");
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
      if (document.hidden) { close(); tell("Paused while the tab is hidden"); } else { open(); }
    });
    window.addEventListener("pagehide", close);
    window.addEventListener("pageshow", open);
    open();
  }

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

  // Keys: / goes to the page's search field, g and a digit to a page of the navigation.
  let isGoing = false;
  document.addEventListener("keydown", (event) => {
    const isTyping = FIELDS.includes(event.target.tagName) || event.target.isContentEditable;
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey) { return; }
    const pages = document.querySelectorAll(".nav a");
    if (isGoing && event.key >= "1" && event.key <= String(pages.length)) {
      pages[Number(event.key) - 1].click();
    } else if (event.key === "/") {
      const field = document.querySelector("[data-search], main input[type=search]");
      if (field) { event.preventDefault(); field.focus(); }
    }
    isGoing = event.key === "g";
  });

  // A menu closes by Escape and by a click elsewhere.
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") { return; }
    for (const menu of document.querySelectorAll("details.menu[open]")) {
      menu.open = false;
      menu.querySelector("summary").focus();
    }
  });
  document.addEventListener("click", (event) => {
    for (const menu of document.querySelectorAll("details.menu[open]")) {
      if (!menu.contains(event.target)) { menu.open = false; }
    }
  });

  // On a narrow window the navigation scrolls: show the page that is open.
  const nav = document.querySelector(".nav");
  const current = nav && nav.querySelector("[aria-current]");
  if (current) { nav.scrollLeft = current.offsetLeft - nav.offsetLeft - (nav.clientWidth - current.offsetWidth) / 2; }

  for (const part of document.querySelectorAll("[data-live]")) { follow(part); }
})();

// What JavaScript adds to the what-if page: sliders, whose steps are equal factors, beside the numbers.
"use strict";

(() => {
  for (const slider of document.querySelectorAll("[data-slider]")) {
    const field = document.getElementById(slider.dataset.slider);
    const low = Math.log(Number(slider.dataset.low));
    const high = Math.log(Number(slider.dataset.high));
    const steps = Number(slider.max);

    function follow() {
      const value = Number(field.value || slider.dataset.current);
      slider.value = String(Math.round((steps * (Math.log(Math.max(1, value)) - low)) / (high - low)));
      slider.setAttribute("aria-valuetext", field.value || `${slider.dataset.current} (current)`);
    }

    slider.hidden = false;
    slider.addEventListener("input", () => {
      const value = Math.exp(low + ((high - low) * Number(slider.value)) / steps);
      field.value = String(value < 100 ? Math.round(value) : Number(value.toPrecision(2)));
      slider.setAttribute("aria-valuetext", field.value);
    });
    field.addEventListener("input", follow);
    follow();
  }
})();

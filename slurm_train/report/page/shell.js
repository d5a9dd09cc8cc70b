// Theme, and what paper needs: opened folds.
(() => {
  "use strict";
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const wish = window.matchMedia("(prefers-color-scheme: dark)");
  const show = (theme) => {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "light" : "dark";
  };
  show(wish.matches ? "dark" : "light");
  wish.addEventListener("change", () => show(wish.matches ? "dark" : "light"));
  button.hidden = false;
  button.addEventListener("click", () => show(root.dataset.theme === "dark" ? "light" : "dark"));

  let opened = [];
  window.addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open]):not(.difference)")];
    opened.forEach((one) => { one.open = true; });
  });
  window.addEventListener("afterprint", () => opened.forEach((one) => { one.open = false; }));
})();

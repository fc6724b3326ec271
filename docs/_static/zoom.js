// A figure opens in full width when it is clicked, or chosen with the keyboard. Escape, or a click, closes it.
const shown = document.createElement("dialog");
shown.className = "zoom";
shown.addEventListener("click", () => shown.close());
shown.addEventListener("keydown", (event) => event.key === "Escape" && shown.close());
document.body.append(shown);
for (const figure of document.querySelectorAll("article img")) {
  const open = () => {
    const whole = figure.cloneNode();
    whole.removeAttribute("style");
    whole.removeAttribute("tabindex");
    shown.replaceChildren(whole);
    shown.showModal();
  };
  figure.tabIndex = 0;
  figure.addEventListener("click", open);
  figure.addEventListener("keydown", (event) => event.key === "Enter" && open());
}

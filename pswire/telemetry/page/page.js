"use strict";
// The address bar and the history keep no code: from here on a cookie has it, which no script can read.
history.replaceState(null, "", location.pathname);
const live = document.getElementById("live");
const source = new EventSource("events");
source.addEventListener("open", () => { live.textContent = "Live."; });
source.addEventListener("parts", (event) => {
  for (const [name, html] of Object.entries(JSON.parse(event.data))) {
    const part = document.getElementById(name);
    if (part) part.innerHTML = html;
  }
});
source.addEventListener("over", (event) => {
  source.close();
  live.textContent = event.data;
});
source.addEventListener("error", () => {
  live.textContent = source.readyState === EventSource.CLOSED
    ? "Not live: too many pages are open, or the code is over. Reload this page."
    : "Not live: the connection was lost; it is tried again.";
});

const data = JSON.parse(document.getElementById("cdp-data").textContent);
const form = document.querySelector(".cdp-form"), panes = document.querySelectorAll(".cdp-pane");
const inflate = async packed => {
  const bytes = Uint8Array.from(atob(packed ?? ""), letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return bytes.length ? new Response(stream).text() : "";
};
const offer = () => {
  // Large schedules are simulated on equal stages only.
  for (const option of form.elements.costs.options) option.disabled = !(`${form.elements.size.value}/${option.value}` in data);
  if (form.elements.costs.selectedOptions[0].disabled) form.elements.costs.selectedIndex = 0;
};
const show = async () => {
  offer();
  const chosen = Object.fromEntries(new FormData(form));
  history.replaceState(null, "", `#${new URLSearchParams(chosen)}`);
  const group = data[`${chosen.size}/${chosen.costs}`], schedule = chosen.schedule, compared = chosen["compared with"];
  const names = [schedule, compared, `${schedule} ${compared}`];
  const [first, second, verdict] = await Promise.all(names.map(name => inflate(group[name])));
  panes[0].innerHTML = first;
  panes[1].innerHTML = second;
  const svgs = [...document.querySelectorAll(".cdp-grid")];
  const wide = Math.max(...svgs.map(svg => svg.viewBox.baseVal.width));
  const least = Math.max(...svgs.map(svg => parseFloat(svg.style.minWidth)));
  for (const svg of svgs) {
    svg.viewBox.baseVal.width = wide;
    Object.assign(svg.style, { minWidth: `${least}px`, maxWidth: `${1.35 * wide}px` });
  }
  panes[1].hidden = schedule === compared;
  document.querySelector(".cdp-verdict").textContent = verdict;
  document.querySelector(".cdp-play input").dispatchEvent(new Event("input", { bubbles: true }));
};
const read = () => {
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    const field = form.elements[name];
    if ([...(field?.options ?? [])].some(option => option.value === value)) field.value = value;
  }
  show();
};
form.addEventListener("change", show);
window.addEventListener("hashchange", read);
read();

if (!window.cdpExplorer) {
  window.cdpExplorer = true;
  const place = cell => {
    const box = cell.querySelector("rect").getBBox();
    return { left: box.x, right: box.x + box.width, y: box.y + box.height / 2 + cell.parentNode.transform.baseVal[0].matrix.f };
  };
  const arrow = (layer, from, to, kind) => {
    const a = place(from), b = place(to), x = (a.right + b.left) / 2;
    const path = document.createElementNS(layer.namespaceURI, "path");
    path.setAttribute("class", kind);
    path.setAttribute("d", `M${a.right} ${a.y}C${x} ${a.y} ${x} ${b.y} ${b.left} ${b.y}l-5 -4m5 4l-5 4`);
    layer.append(path);
  };
  const light = cell => {
    const svg = cell.ownerSVGElement, layer = svg.querySelector(".cdp-arrows");
    svg.classList.add("cdp-lit");
    cell.classList.add("cdp-this");
    const waits = cell.dataset.waits.split(" ");
    for (const other of svg.querySelectorAll(".cdp-op")) {
      if (waits.includes(other.dataset.op)) {
        other.classList.add("cdp-before");
        arrow(layer, other, cell, "cdp-before");
      } else if (other.dataset.waits.split(" ").includes(cell.dataset.op)) {
        other.classList.add("cdp-after");
        arrow(layer, cell, other, "cdp-after");
      }
    }
  };
  const clear = () => {
    for (const svg of document.querySelectorAll(".cdp-lit")) {
      svg.classList.remove("cdp-lit");
      svg.querySelector(".cdp-arrows").replaceChildren();
      for (const cell of svg.querySelectorAll(".cdp-op")) cell.classList.remove("cdp-this", "cdp-before", "cdp-after");
    }
  };
  document.addEventListener("pointerover", event => {
    clear();
    const cell = event.target.closest?.(".cdp-op");
    if (cell) light(cell);
  });
  const move = scrub => {
    const share = scrub.value / 1000, svgs = [...scrub.closest(".cdp-view").querySelectorAll(".cdp-grid")];
    const most = name => Math.max(...svgs.map(svg => svg.dataset[name]));
    if (!svgs.length) return;
    scrub.parentNode.querySelector("output").textContent = `${(share * most("time")).toPrecision(3)} ${svgs[0].dataset.unit}`;
    for (const svg of svgs) {
      const veil = svg.querySelector(".cdp-veil");
      veil.setAttribute("x", share * most("end"));
      // At either end nothing is hidden: the slider starts there, and the page is for reading.
      veil.setAttribute("width", share > 0 && share < 1 ? (1 - share) * most("end") + 20 : 0);
    }
  };
  document.addEventListener("input", event => event.target.matches(".cdp-play input") && move(event.target));
  document.addEventListener("click", event => {
    const button = event.target.closest?.(".cdp-play button");
    if (!button) return;
    const scrub = button.parentNode.querySelector("input"), playing = button.dataset.playing;
    button.dataset.playing = playing ? "" : "yes";
    if (playing) return;
    if (scrub.value === scrub.max) scrub.value = 0;
    let last;
    const tick = now => {
      if (!button.dataset.playing || !button.isConnected) return;
      scrub.value = Number(scrub.value) + (last ? Math.round((now - last) / 8) : 0);
      last = now;
      move(scrub);
      if (scrub.value === scrub.max) button.dataset.playing = "";
      else requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  });
}

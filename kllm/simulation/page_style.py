"""The looks of the page and its one small script: readings under the pointer, on all timelines at once."""

CSS = """
:root{color-scheme:light dark;--bg:#f6f7f8;--card:#fff;--ink:#1b2126;--soft:#5d6872;--rule:#e1e5e8;--grid:#e9ecef;
--a:#2166c4;--b:#c8600f;--c:#0d8377;--d:#7a4fc0;--bad:#c22b45;--shade:#c22b4518}
@media (prefers-color-scheme:dark){:root{--bg:#111417;--card:#191d21;--ink:#e4e8eb;--soft:#98a3ad;--rule:#2b3137;
--grid:#262b31;--a:#6aa6f8;--b:#f09a4e;--c:#43c4b4;--d:#b697f2;--bad:#ff7187;--shade:#ff718722}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.45 system-ui,"Segoe UI",Roboto,"Helvetica Neue",
"DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1160px;margin:0 auto;padding:20px 16px 48px}
h1{font-size:24px;line-height:1.2;margin:8px 0 2px}
h2{font-size:18px;margin:32px 0 10px}
h2 small{font-size:13px;font-weight:400;margin-left:8px}
h3{font-size:14px;margin:0}
p{margin:0}
.lead,figcaption p,.tile small,footer,.note{color:var(--soft)}
section>.note{font-size:13px}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:14px 16px;margin:12px 0}
dl.settings{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,250px),1fr));gap:4px 24px;margin:0}
dl.settings div{display:flex;gap:10px;justify-content:space-between;border-bottom:1px solid var(--grid);padding:3px 0}
dt{color:var(--soft)}
dd{margin:0;text-align:right;overflow-wrap:anywhere}
ul{margin:0;padding-left:20px}
li{overflow-wrap:anywhere}
summary{cursor:pointer}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,206px),1fr));gap:10px}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:11px 14px}
.tile span{display:block;color:var(--soft);font-size:13px}
.tile strong{display:block;font-size:25px;line-height:1.25;font-weight:650;letter-spacing:-.01em}
.tile small{display:block;font-size:12.5px;line-height:1.35}
.tile.bad strong{color:var(--bad)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;white-space:nowrap}
th,td{text-align:right;padding:4px 0 4px 16px;border-bottom:1px solid var(--grid)}
th{color:var(--soft);font-weight:500}
th:first-child,td:first-child{text-align:left;padding-left:0}
figure{margin:0;min-width:0}
figure+figure{margin-top:18px}
.pair,.small{display:grid;gap:14px 26px;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr))}
.small{grid-template-columns:repeat(auto-fit,minmax(min(100%,236px),1fr))}
.pair figure+figure,.small figure+figure{margin-top:0}
figcaption{display:flex;flex-wrap:wrap;gap:0 14px;align-items:baseline}
figcaption p{font-size:13px}
.legend{display:flex;flex-wrap:wrap;gap:0 14px;font-size:12.5px;color:var(--soft);margin-left:auto}
.legend s{display:inline-block;width:14px;height:0;border-top:2px solid;margin-right:5px;vertical-align:middle}
.legend s.wide{border-top-width:9px;opacity:.3}
.legend s.dot{width:7px;height:7px;border:0;border-radius:50%;background:currentColor}
.legend s.slo{border-top-style:dashed}
.yt{font-size:11.5px;color:var(--soft);margin:5px 0 7px}
.xt{font-size:11.5px;color:var(--soft);text-align:right;margin-top:19px}
.plot{position:relative;height:126px;margin:0 10px 0 50px;font-size:11.5px;line-height:14px}
.tall .plot{height:270px}
.small .plot{height:66px}
.small .chart .xt,.small .chart .yt{display:none}
.small .plot{margin-top:9px}
.small .plot u.odd{display:none}
.small .chart{padding-bottom:19px}
.plot svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}
.plot path{fill:none;vector-effect:non-scaling-stroke}
.grid{stroke:var(--grid)}
.line{stroke:currentColor;stroke-width:1.6;stroke-linejoin:round;stroke-linecap:round}
.plot .band{fill:currentColor;opacity:.2}
.dots{stroke:currentColor;stroke-width:3.6;stroke-linecap:round;opacity:.5}
.few .dots{stroke-width:6;opacity:.7}
.dots.big{stroke-width:8;opacity:1}
.mark{stroke:currentColor;stroke-width:1.2}
.mark.fault{opacity:.75}
.mark.slo{stroke-dasharray:5 4}
.shade{fill:var(--shade)}
.a{color:var(--a)}.b{color:var(--b)}.c{color:var(--c)}.d{color:var(--d)}.fault,.slo{color:var(--bad)}
.plot u{position:absolute;color:var(--soft);text-decoration:none;white-space:nowrap}
.plot u.x{top:100%;margin-top:4px;transform:translateX(-50%)}
.plot u.y{right:100%;margin-right:6px;transform:translateY(-50%)}
.plot b{position:absolute;bottom:100%;font-weight:500;font-size:11px;white-space:nowrap}
.plot b.slo{bottom:4px;margin:0 4px}
.plot i,.plot b.slo{padding:0 4px;background:color-mix(in srgb,var(--card) 72%,transparent);border-radius:4px}
.plot i{position:absolute;margin:6px 7px;font-style:normal;white-space:nowrap}
.plot i.above{transform:translateY(-7px);margin:0 9px}
.plot i.low{margin-top:24px}
.cross{position:absolute;top:0;bottom:0;width:1px;background:var(--soft);pointer-events:none}
.tip{position:absolute;z-index:2;top:4px;pointer-events:none;background:var(--card);border:1px solid var(--rule);
border-radius:6px;padding:4px 8px;box-shadow:0 2px 8px #0003;white-space:nowrap;font-size:12px;line-height:16px}
footer{margin-top:28px;font-size:13px;overflow-wrap:anywhere}
@media (max-width:560px){main{padding:12px 10px 32px}.card{padding:12px}.plot{margin-left:44px}
.plot u.odd{display:none}.legend{margin-left:0}.tiles{grid-template-columns:1fr 1fr}.tile{padding:9px 11px}
.tile strong{font-size:21px}h1{font-size:21px}}
@media print{body{background:#fff}.card,.tile{break-inside:avoid}}
"""

SCRIPT = """
(() => {
  const plots = [...document.querySelectorAll('[data-hover]')];
  const clear = () => document.querySelectorAll('.cross,.tip').forEach(e => e.remove());
  const cross = (plot, at) => {
    const line = plot.appendChild(document.createElement('div'));
    line.className = 'cross';
    line.style.left = at / 10 + '%';
  };
  plots.forEach(plot => {
    const [places, readings] = JSON.parse(plot.dataset.hover);
    const timeline = !!plot.closest('.time');
    plot.addEventListener('pointerleave', clear);
    plot.addEventListener('pointermove', event => {
      clear();
      const box = plot.getBoundingClientRect();
      const at = (event.clientX - box.left) / box.width * 1000;
      let best = 0;
      places.forEach((place, i) => { if (Math.abs(place - at) < Math.abs(places[best] - at)) best = i; });
      (timeline ? plots.filter(p => p.closest('.time')) : [plot]).forEach(p => cross(p, places[best]));
      const tip = plot.appendChild(document.createElement('div'));
      tip.className = 'tip';
      readings.forEach(([name, texts]) => {
        tip.appendChild(document.createElement('div')).textContent = name + ' ' + texts[best];
      });
      tip.style[places[best] < 500 ? 'left' : 'right'] =
        'calc(' + (places[best] < 500 ? places[best] : 1000 - places[best]) / 10 + '% + 10px)';
    });
  });
})();
"""

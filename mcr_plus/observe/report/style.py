"""The style sheet of the report: light and dark, narrow and wide."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --text: #1b2430; --quiet: #5d6b7c; --line: #e1e6ec;
  --computing: #b9cde4; --waiting: #d9534f; --problem: #c4392f; --gain: #1c7c54; --note: #5d6b7c;
  --code: #f1f4f7;
  --k0: #2f6fb3; --k1: #e08b2c; --k2: #3c9a5f; --k3: #8d5fb0; --k4: #c05a86; --k5: #2b9aa0; --k6: #97823a;
  --k7: #6b7785;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1b2129; --text: #e4e9f0; --quiet: #95a3b5; --line: #2c3541;
    --computing: #34506f; --waiting: #e0645f; --problem: #ff8479; --gain: #5fcf9a; --note: #95a3b5;
    --code: #141a21;
    --k0: #5a9be0; --k1: #f0a655; --k2: #62c488; --k3: #b48ad6; --k4: #e184ad; --k5: #54c3c9; --k6: #c4ae62;
    --k7: #97a4b3;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
main { max-width: 1180px; margin: 0 auto; padding: 28px 24px 60px; }
header h1 { margin: 0; font-size: 1.7rem; letter-spacing: -.01em; overflow-wrap: anywhere; }
header p { margin: .1rem 0 1.2rem; color: var(--quiet); }
section {
  background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 18px 20px;
  margin-top: 18px;
}
h2 { margin: 0 0 .6rem; font-size: 1.1rem; }
.quiet { color: var(--quiet); font-size: .86rem; margin: 0 0 .7rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 14px; }
.tile {
  background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 12px 16px;
  display: grid; align-content: start;
}
.tile span { color: var(--quiet); font-size: .82rem; }
.tile b { font-size: 1.55rem; line-height: 1.3; letter-spacing: -.01em; }
.tile small { color: var(--quiet); }
article { border-left: 4px solid var(--note); padding: 2px 0 2px 14px; margin: 0 0 1rem; }
article:last-child { margin-bottom: 0; }
article.problem { border-color: var(--problem); }
article.gain { border-color: var(--gain); }
article h3 { margin: 0; font-size: 1rem; }
article h3 span {
  display: inline-block; margin-right: .5rem; padding: 0 .45rem; border-radius: 6px; font-size: .72rem;
  font-weight: 600;
  border: 1px solid currentColor; color: var(--note); vertical-align: .1em;
}
article.problem h3 span { color: var(--problem); }
article.gain h3 span { color: var(--gain); }
article p { margin: .2rem 0 .4rem; max-width: 90ch; }
pre {
  background: var(--code); border: 1px solid var(--line); border-radius: 8px; padding: 8px 12px; margin: 0;
  font: 13px/1.45 ui-monospace, "SFMono-Regular", Menlo, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
.scroll { overflow-x: auto; margin: 0 -4px; }
.scroll + .scroll { margin-top: 1rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th { text-align: left; font-weight: 600; color: var(--quiet); font-size: .8rem; }
th, td { padding: 5px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
tbody tr:last-child td { border-bottom: 0; }
tbody tr:hover { background: color-mix(in srgb, var(--line) 35%, transparent); }
td small { display: block; color: var(--quiet); font-size: .78rem; line-height: 1.2; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
.meter {
  display: inline-block; min-width: 84px; padding-bottom: 4px;
  background:
    linear-gradient(var(--waiting) 0 0) right bottom / var(--share) 3px no-repeat,
    linear-gradient(var(--line) 0 0) right bottom / 100% 3px no-repeat;
}
.legend {
  display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: .82rem; color: var(--quiet); margin-bottom: .8rem;
}
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.timeline { position: relative; }
.axis {
  position: relative; height: 1.3em; font-size: .76rem; color: var(--quiet); border-bottom: 1px solid
  var(--line);
}
.axis span { position: absolute; white-space: nowrap; font-variant-numeric: tabular-nums; }
.rank { margin: .7rem 0 .15rem; font-size: .84rem; color: var(--quiet); }
.rank b { color: var(--text); }
.lane {
  position: relative; height: 15px; margin: 2px 0; border-radius: 4px; overflow: hidden; background:
  var(--code);
}
.lane.program { height: 20px; background: var(--computing); }
.lane i { position: absolute; top: 0; bottom: 0; border-radius: 2px; min-width: 1px; }
.row { display: grid; grid-template-columns: 58px 1fr; align-items: center; }
.row em {
  font: 11px/15px system-ui, "DejaVu Sans", sans-serif; color: var(--quiet);
  overflow: hidden; text-overflow: ellipsis;
}
.share {
  display: grid; grid-template-columns: 64px 1fr 96px; gap: 10px; align-items: center; font-size: .86rem;
}
.share span { white-space: nowrap; }
.share span:last-child { text-align: right; font-variant-numeric: tabular-nums; }
.computing { background: var(--computing); }
.waiting { background: var(--waiting); }
.k0 { background: var(--k0); } .k1 { background: var(--k1); } .k2 { background: var(--k2); }
.k3 { background: var(--k3); } .k4 { background: var(--k4); } .k5 { background: var(--k5); }
.k6 { background: var(--k6); } .k7 { background: var(--k7); }
ul { margin: 0; padding-left: 1.2rem; font-size: .88rem; color: var(--quiet); }
@media (max-width: 640px) {
  main { padding: 16px 12px 40px; }
  section { padding: 14px 12px; }
  header h1 { font-size: 1.35rem; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 10px; }
  .tile { padding: 10px 12px; }
  .tile b { font-size: 1.25rem; }
  .share { grid-template-columns: 48px 1fr 88px; gap: 6px; }
  .row { grid-template-columns: 42px 1fr; }
  .row em { font-size: 10px; }
  .axis span:nth-child(2), .axis span:nth-child(4) { display: none; }
  thead { display: none; }
  table, tbody { display: block; }
  tr {
    display: grid; grid-template-columns: repeat(3, 1fr); gap: 4px 10px; padding: 8px 0;
    border-bottom: 1px solid var(--line);
  }
  tbody tr:last-child { border-bottom: 0; }
  td { display: block; padding: 0; border: 0; white-space: normal; overflow-wrap: anywhere; }
  td:not(.n) { grid-column: 1 / -1; }
  td.n { text-align: left; }
  td.n::before {
    content: attr(data-of); display: block; color: var(--quiet); font-size: .74rem; line-height: 1.3;
  }
  .meter { min-width: 0; width: 100%; background-position: left bottom; }
  .scroll { margin: 0; }
}
"""

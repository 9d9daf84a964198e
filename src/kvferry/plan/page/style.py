"""The style sheet of the page, in a light and a dark version."""

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1d2327;--dim:#5c666f;--line:#d5dbe0;
--l0:#3b6ea5;--l1:#7fa7cf;--l2:#3f8f7c;--l3:#86bfae;--l4:#8a6bb1;--l5:#b9a3d6;
--r0:#e08a2e;--r1:#c2478d;--r2:#6a9a2d;--r3:#c9443a;--r4:#2b93b8;--r5:#8d7a2a}
@media(prefers-color-scheme:dark){:root{--bg:#14181c;--fg:#e4e9ed;--dim:#9aa5ae;--line:#333b43;
--l0:#5b93d0;--l1:#2f5a88;--l2:#4fae98;--l3:#2b6657;--l4:#a78bd2;--l5:#5d4787;
--r0:#f0a14d;--r1:#e077b3;--r2:#93c653;--r3:#ee7469;--r4:#5bbcdd;--r5:#c4ae55}}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px}
h1{font-size:24px;margin:0}h2{font-size:19px;margin:36px 0 0}h3{font-size:15px;margin:18px 0 0}
p{margin:4px 0 8px}
table{border-collapse:collapse;margin:14px 0;width:100%;font-variant-numeric:tabular-nums}
th{font-weight:600;color:var(--dim)}
th,td{padding:4px 10px 4px 0;border-bottom:1px solid var(--line);text-align:right}
th:first-child,td:first-child,th:nth-child(7),td:nth-child(7){text-align:left}
.note,section p{color:var(--dim)}.legend{display:flex;flex-wrap:wrap;gap:6px 26px;color:var(--dim)}
.legend i{display:inline-block;width:14px;height:10px;margin-right:2px}
svg{width:100%;height:auto;display:block;overflow:visible}
text{font:11px system-ui,sans-serif;fill:var(--dim)}rect{stroke:var(--bg);stroke-width:.5}
.rule{fill:none;stroke:var(--dim)}path[class^=r]:not(.rule){fill-opacity:.38}path:not(.rule):hover{fill-opacity:.9}
rect:hover{opacity:.7}
""" + "".join(
    f".l{n}{{fill:var(--l{n});background:var(--l{n})}}.r{n}{{fill:var(--r{n});background:var(--r{n})}}"
    for n in range(6)
)

// Tables that are sorted by a press on a column's name. What is missing comes last, whichever way round.
(() => {
  "use strict";
  const key = (row, column) => {
    const value = row.cells[column].dataset.v;
    if (value === undefined || value === "") return null;
    const number = Number(value);
    return Number.isNaN(number) ? value : number;
  };

  const compare = (one, other) => {
    if (typeof one === typeof other) return one < other ? -1 : one > other ? 1 : 0;
    return typeof one === "number" ? -1 : 1;
  };

  const sort = (table, column, way) => {
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row, index) => [key(row, column), index, row]);
    rows.sort(([one, first], [other, second]) => {
      if (one === null || other === null) return (one === null) - (other === null) || first - second;
      return way * compare(one, other) || first - second;
    });
    body.append(...rows.map(([, , row]) => row));
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const ascending = head.getAttribute("aria-sort") !== "ascending";
        for (const one of table.tHead.rows[0].cells) one.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
        sort(table, column, ascending ? 1 : -1);
      });
    });
  }
})();

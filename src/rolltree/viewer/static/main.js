import { api } from "./api.js";

const root = document.getElementById("root");
api.get("/api/runs").then(
  ({ runs }) => { root.textContent = runs.map((run) => run.id).join("\n"); },
  (error) => { root.textContent = error.message; },
);

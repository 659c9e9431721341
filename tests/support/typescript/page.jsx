// A page of a user: it follows the task that its address names, and holds no key.
import { createRoot } from "react-dom/client";
import { useTask } from "asyncgate/react";

const { task, gate } = Object.fromEntries(new URLSearchParams(location.search));
const ask = async (path, signal) => {
  const answer = await fetch(path, { signal });
  if (!answer.ok) throw new Error(await answer.text());
  return await answer.json();
};

function View() {
  const { status, progress, result, ended, error } = useTask(task, {
    url: gate, load: (id, signal) => ask(`/tasks/${id}`, signal), ticket: (id, signal) => ask(`/tasks/${id}/ticket`, signal) });
  return <p>{error ? "away" : `${status} at ${progress?.page ?? 0}, ${ended ? `ended with ${result}` : "going on"}`}</p>;
}

createRoot(document.getElementById("root")).render(<View />);

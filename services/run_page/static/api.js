// Requests to the server of this page. A token is kept until the tab is closed.

const KEY = "jobgroup-token";
const SECONDS = 20;

/** The server asks for a token, or refuses ours. */
export class TokenError extends Error {}

/** The server could not be reached, or failed. */
export class UnreachableError extends Error {}

/** The server answered, with a refusal. */
export class RefusedError extends UnreachableError {}

export const hasToken = () => sessionStorage.getItem(KEY) !== null;
export const keepToken = (token) => sessionStorage.setItem(KEY, token);
export const forgetToken = () => sessionStorage.removeItem(KEY);

/** Returns the reply of GET ``path`` with the query ``parameters`` (without those that are null or ""). */
export async function get(path, parameters = {}) {
  const present = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(present).toString();
  const token = sessionStorage.getItem(KEY);
  let response;
  try {
    response = await fetch(query ? `${path}?${query}` : path, {
      headers: token === null ? {} : { Authorization: `Bearer ${token}` },
      signal: AbortSignal.timeout(1000 * SECONDS),
      cache: "no-store",
    });
  } catch (error) {
    throw new UnreachableError(String(error.message ?? error));
  }
  if (response.status === 401) throw new TokenError();
  if (!response.ok) throw new RefusedError(await refusal(response));
  return response.json();
}

async function refusal(response) {
  const text = await response.text();
  try {
    return `${response.status} ${JSON.parse(text).detail}`;
  } catch {
    return `${response.status} ${text.slice(0, 200)}`;
  }
}

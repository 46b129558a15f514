//! `fovea-sidecar doctor` against a simulated engine, as it is and behind a front that spoils one thing.

#[cfg(test)]
mod front;
#[cfg(test)]
mod others;
#[cfg(test)]
mod program;
#[cfg(test)]
mod vllm;

//! The balancer's two ports on the wire, with scripted clients and sidecars.

#![expect(clippy::unwrap_used, reason = "helpers of tests: a failure is the test's")]

mod bodies;
mod front;
mod guard;
mod hygiene;
mod start;
mod support;
mod sync;

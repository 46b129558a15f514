//! The media fetcher against scripted origins and a scripted resolver, on loopback.

#![expect(clippy::unwrap_used, reason = "helpers of tests: a failure is the test's")]

mod bounds;
mod command;
mod heads;
mod keeping;
mod sharing;
mod ssrf;
mod support;
mod tls;

//! The simulated engine as a program. Prints one JSON line when it is ready; ends on SIGTERM or SIGINT.

use anyhow::{Context, bail};
use clap::Parser;
use engine_sim::{Sim, SimConfig};
use std::io::Write;
use tokio::signal::unix::{SignalKind, signal};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let sim = Sim::start(SimConfig::parse()).await.context("the engine did not start")?;
    let ready = serde_json::json!({"ready": true, "http": sim.http, "events": sim.events, "replay": sim.replay,
        "ranks": sim.sources.len()});
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{ready}")?;
    stdout.flush()?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        died = sim.ended() => if died { bail!("died by a fault, as asked") },
    }
    sim.stop().await;
    Ok(())
}

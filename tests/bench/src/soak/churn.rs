//! What happens to the fleet meanwhile: in turn an engine dies and comes back, and a sidecar dies and comes back.

use std::time::Duration;

use anyhow::Context;
use e2e::Fleet;
use e2e::eventually;
use tokio::time::Instant;

use super::Plan;
use super::load::Tally;

/// How long a program stays away.
const AWAY: Duration = Duration::from_secs(2);
/// Longest wait for a worker to be back.
const BACK_MAX: Duration = Duration::from_secs(30);

/// Kills and restarts until `until`. The first engine and sidecar are left alone.
pub async fn churn(fleet: &mut Fleet, plan: &Plan, until: Instant, tally: &Tally) -> anyhow::Result<()> {
    for turn in 0usize.. {
        let next = Instant::now() + plan.kill_every;
        if next + BACK_MAX > until {
            tokio::time::sleep_until(until).await;
            return Ok(());
        }
        tokio::time::sleep_until(next).await;
        let victim = 1 + (turn / 2) % (fleet.engines.len() - 1);
        tally.killed();
        if turn.is_multiple_of(2) { engine(fleet, victim).await? } else { sidecar(fleet, victim).await? }
    }
    Ok(())
}

/// On the same port again, with an empty cache.
async fn engine(fleet: &mut Fleet, victim: usize) -> anyhow::Result<()> {
    let address = fleet.engines[victim].addr("http")?;
    let port = address.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).context("an address has a port")?;
    fleet.engines.remove(victim).kill().await?;
    tokio::time::sleep(AWAY).await;
    // The port may be in use for a moment still.
    let engine =
        eventually("the engine is back", BACK_MAX, || async { Ok(fleet.start_engine(victim, port).await.ok()) });
    let engine = engine.await?;
    fleet.engines.insert(victim, engine);
    Ok(())
}

async fn sidecar(fleet: &mut Fleet, victim: usize) -> anyhow::Result<()> {
    fleet.sidecars.remove(victim).kill().await?;
    tokio::time::sleep(AWAY).await;
    let url = format!("http://{}", fleet.engines[victim].addr("http")?);
    let sidecar = fleet.start_sidecar(victim, &url).await?;
    fleet.sidecars.insert(victim, sidecar);
    Ok(())
}

//! Balancers come and go: a sidecar finds the new ones and leaves the old ones, without a restart.

#![expect(clippy::unwrap_used, reason = "helpers of tests: a failure is the test's")]

use std::time::Duration;

use e2e::{Fleet, FleetConfig, Mode, Program, eventually};
use tokio::net::TcpListener;

const LIMIT: Duration = Duration::from_secs(30);

async fn balancer(fleet: &Fleet, name: &str, sync: &str) -> Program {
    let path = fleet.dir().join(format!("{name}.yaml"));
    std::fs::write(&path, format!("listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nsync: {sync}\n")).unwrap();
    let args = ["run".to_owned(), "--config".to_owned(), path.display().to_string()];
    Program::start("fovea-balancer", &args, &fleet.dir().join(format!("{name}.log"))).await.unwrap()
}

/// Waits until the sidecar counts this many streams.
async fn streams(fleet: &Fleet, sidecar: &Program, count: usize) {
    let url = format!("http://{}/metrics", sidecar.addr("admin").unwrap());
    let counted = || async {
        let page = String::from_utf8_lossy(&fleet.client.get(&url).await?.body).into_owned();
        Ok(page.lines().any(|line| line == format!("sidecar_gossip_streams {count}")).then_some(()))
    };
    eventually(&format!("{count} streams"), LIMIT, counted).await.unwrap();
}

/// An address that nobody listens at for now.
async fn free() -> String {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().to_string()
}

#[tokio::test]
async fn balancers_are_joined_and_left_while_the_others_serve() {
    let fleet = Fleet::without_workers(FleetConfig::tiny(1, Mode::Precise)).await.unwrap();
    let engine = fleet.start_engine(0, 0).await.unwrap();
    let (first, second) = (fleet.balancer.addr("sync").unwrap(), free().await);
    // The second by a name, whose other address (::1) nobody listens at.
    let port = second.rsplit_once(':').unwrap().1.to_owned();
    let yaml = format!(
        "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nbalancers: ['{first}', 'localhost:{port}']\nengine: {{url: 'http://{}', check_interval: 200ms}}\ngossip: {{resolve_interval: 200ms, backoff_max: 300ms}}\n",
        engine.addr("http").unwrap()
    );
    let path = fleet.dir().join("sidecar.yaml");
    std::fs::write(&path, yaml).unwrap();
    let args = ["run".to_owned(), "--config".to_owned(), path.display().to_string()];
    let sidecar = Program::start("fovea-sidecar", &args, &fleet.dir().join("sidecar.log")).await.unwrap();
    streams(&fleet, &sidecar, 1).await;
    let joined = balancer(&fleet, "second", &second).await;
    streams(&fleet, &sidecar, 2).await;
    joined.kill().await.unwrap();
    streams(&fleet, &sidecar, 1).await;
    fleet.wait_for_workers(1).await.unwrap();
    let again = balancer(&fleet, "second", &second).await;
    streams(&fleet, &sidecar, 2).await;
    again.stop(LIMIT).await.unwrap();
    streams(&fleet, &sidecar, 1).await;
}

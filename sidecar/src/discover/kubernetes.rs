//! The EndpointSlices of one service, watched: a list first, then changes, a new list whenever the watch is lost.
//!
//! Needs `get`, `list` and `watch` on `endpointslices` of group `discovery.k8s.io` in the service's namespace (`deploy/k8s/rbac.yaml`).
//! Endpoints count whether they are ready or not: a balancer becomes ready by the sidecars that dial it.

use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt as _};

use super::{Sight, Teller};

/// Between two tries to set up the client.
const CLIENT_PAUSE: Duration = Duration::from_secs(5);

/// Tells the slices of `service` until nobody listens. What goes wrong is tried again, less and less often.
pub(super) async fn follow(namespace: &str, service: &str, port: &str, tell: Teller) {
    let client = client().await;
    let slices: Api<EndpointSlice> = Api::namespaced(client, namespace);
    let ours = watcher::Config::default().labels(&format!("kubernetes.io/service-name={service}"));
    let mut events = pin!(watcher(slices, ours).default_backoff());
    let mut failing = false;
    while let Some(event) = events.next().await {
        let sight = match event {
            Ok(event) => {
                failing = false;
                sight(event, port)
            }
            Err(error) => {
                if !failing {
                    let error: &(dyn std::error::Error + 'static) = &error;
                    tracing::warn!(
                        service,
                        namespace,
                        error,
                        "cannot watch a service's endpoints; see deploy/k8s/rbac.yaml"
                    );
                }
                failing = true;
                continue;
            }
        };
        if !tell.tell(sight).await {
            return;
        }
    }
}

async fn client() -> Client {
    loop {
        match Client::try_default().await {
            Ok(client) => return client,
            Err(error) => {
                tracing::warn!(%error, "cannot reach Kubernetes: is a service account mounted?");
                tokio::time::sleep(CLIENT_PAUSE).await;
            }
        }
    }
}

fn sight(event: Event<EndpointSlice>, port: &str) -> Sight {
    match event {
        Event::Init => Sight::ListBegins,
        Event::InitApply(slice) => Sight::Listed { piece: slice.name_any(), addresses: addresses(&slice, port) },
        Event::InitDone => Sight::ListEnds,
        Event::Apply(slice) => Sight::Applied { piece: slice.name_any(), addresses: addresses(&slice, port) },
        Event::Delete(slice) => Sight::Deleted { piece: slice.name_any() },
    }
}

/// Addresses of a slice with its port of this number or name; a slice of host names gives none.
fn addresses(slice: &EndpointSlice, wanted: &str) -> Vec<SocketAddr> {
    let named = |port: &&k8s_openapi::api::discovery::v1::EndpointPort| port.name.as_deref() == Some(wanted);
    let by_name = slice.ports.iter().flatten().find(named).and_then(|port| port.port);
    let port = by_name.and_then(|port| u16::try_from(port).ok()).or_else(|| wanted.parse().ok());
    let Some(port) = port else { return Vec::new() };
    let all = slice.endpoints.iter().flatten().flat_map(|endpoint| &endpoint.addresses);
    all.filter_map(|address| Some(SocketAddr::new(address.parse::<IpAddr>().ok()?, port))).collect()
}

//! An address or a name, looked up again and again.

use std::net::SocketAddr;
use std::time::Duration;

use super::{Sight, Teller};

/// Tells the addresses of `name`, at once and then `every` so often, until nobody listens. A failed lookup tells nothing.
pub(super) async fn follow<F: Future<Output = std::io::Result<Vec<SocketAddr>>>>(
    name: &str,
    every: Duration,
    look_up: impl Fn(String) -> F,
    tell: Teller,
) {
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut failing = false;
    loop {
        ticks.tick().await;
        // A lookup may take as long as there is until the next one.
        let failed = match tokio::time::timeout(every, look_up(name.to_owned())).await {
            Ok(Ok(addresses)) if !addresses.is_empty() => {
                if !tell.tell(Sight::All(addresses)).await {
                    return;
                }
                None
            }
            Ok(Ok(_)) => Some("no address".to_owned()),
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some("it took too long".to_owned()),
        };
        match failed {
            Some(error) if !failing => {
                tracing::warn!(name, error, "cannot resolve a balancer's name; its streams stay as they are");
                failing = true;
            }
            Some(_) => {}
            None => failing = false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::{Arc, Mutex};

    use tokio::sync::mpsc;

    use super::*;
    use crate::discover::set::{Change, EndpointSet};

    fn at(ports: &[u16]) -> Vec<SocketAddr> {
        ports.iter().map(|port| ([10, 0, 0, 1], *port).into()).collect()
    }

    /// A resolver whose answers are written down; after the last it is never asked again.
    fn scripted(answers: Vec<std::io::Result<Vec<SocketAddr>>>) -> impl Fn(String) -> BoxedAnswer {
        let answers = Arc::new(Mutex::new(VecDeque::from(answers)));
        move |_| {
            let next = answers.lock().unwrap().pop_front();
            Box::pin(async move {
                match next {
                    Some(answer) => answer,
                    None => std::future::pending().await,
                }
            })
        }
    }

    type BoxedAnswer = std::pin::Pin<Box<dyn Future<Output = std::io::Result<Vec<SocketAddr>>> + Send>>;

    #[tokio::test(start_paused = true)]
    async fn balancers_come_and_go_as_their_name_says() {
        let failed = || Err(std::io::Error::other("no server answers"));
        let answers = vec![Ok(at(&[1])), Ok(at(&[1, 2])), failed(), Ok(Vec::new()), Ok(at(&[2])), Ok(at(&[2, 3]))];
        let (sender, mut seen) = mpsc::channel(8);
        let look_up = scripted(answers);
        let following = tokio::spawn(async move {
            follow("balancer:7400", Duration::from_secs(3), look_up, Teller { source: 0, sender }).await;
        });
        let mut set = EndpointSet::new(1, 16);
        let mut changes = Vec::new();
        for _ in 0..4 {
            changes.push(set.see(seen.recv().await.unwrap()));
        }
        let dial = |port| Change::Dial { address: ([10, 0, 0, 1], port).into(), source: 0 };
        let leave = |port| Change::HangUp { address: ([10, 0, 0, 1], port).into() };
        assert_eq!(changes, [vec![dial(1)], vec![dial(2)], vec![leave(1)], vec![dial(3)]]);
        following.abort();
    }
}

//! A balancer's end of the block stream: accepts sidecars, checks what they say with the real inbox, and shows what it holds.

use std::collections::HashSet;
use std::net::SocketAddr;

use fovea_gossip::codec::{Decoder, encode_balancer};
use fovea_gossip::inbox::{Change, Inbox};
use fovea_gossip::message::{FromBalancer, FromSidecar, Hello, Load, PROTOCOL};
use fovea_kv::{SequenceHash, Tier};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What the balancer knows of worker 0.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub connections: u32,
    pub hello: Option<Hello>,
    pub epoch: u64,
    pub live: bool,
    pub gpu: HashSet<SequenceHash>,
    pub snapshots: u32,
    pub load: Load,
}

pub struct Balancer {
    pub address: SocketAddr,
    seen: watch::Sender<Seen>,
    task: tokio::task::JoinHandle<()>,
    cut: tokio::sync::broadcast::Sender<()>,
}

impl Balancer {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = watch::Sender::new(Seen::default());
        let cut = tokio::sync::broadcast::Sender::new(1);
        let (shown, cutting) = (seen.clone(), cut.clone());
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                shown.send_modify(|seen| {
                    *seen = Seen { connections: seen.connections + 1, ..Seen::default() };
                });
                let mut cut = cutting.subscribe();
                tokio::select! {
                    () = attend(stream, &shown) => {}
                    _ = cut.recv() => {}
                }
            }
        });
        Self { address, seen, task, cut }
    }

    /// Cuts the connection that stands.
    pub fn cut(&self) {
        self.cut.send(()).unwrap();
    }

    /// Waits until what is known fits.
    pub async fn until(&self, what: &str, fits: impl Fn(&Seen) -> bool) -> Seen {
        let mut watched = self.seen.subscribe();
        let waited = tokio::time::timeout(std::time::Duration::from_secs(30), watched.wait_for(&fits)).await;
        match waited {
            Ok(seen) => seen.unwrap().clone(),
            Err(_) => panic!("{what}: {:#?}", self.seen.borrow()),
        }
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn attend(mut stream: TcpStream, seen: &watch::Sender<Seen>) {
    let (mut decoder, mut inbox, mut bytes) = (Decoder::<FromSidecar>::new(), Inbox::new(), vec![0; 64 << 10]);
    let mut welcomed = false;
    loop {
        let read = stream.read(&mut bytes).await.unwrap_or(0);
        if read == 0 {
            return;
        }
        decoder.push(&bytes[..read]);
        while let Some(message) = decoder.next().unwrap() {
            for change in inbox.apply(message).unwrap() {
                if let Change::Resync { worker } = change {
                    stream.write_all(&encode_balancer(&FromBalancer::Resync { worker })).await.unwrap();
                }
                seen.send_modify(|seen| note(seen, change));
            }
            if !std::mem::replace(&mut welcomed, true) {
                stream.write_all(&encode_balancer(&FromBalancer::Welcome(PROTOCOL))).await.unwrap();
            }
            if let Some((epoch, seq)) = inbox.watermark(0) {
                let ack = FromBalancer::Ack { worker: 0, epoch, seq };
                stream.write_all(&encode_balancer(&ack)).await.unwrap();
            }
        }
    }
}

fn note(seen: &mut Seen, change: Change) {
    match change {
        Change::Hello(hello) => seen.hello = Some(hello),
        Change::Begin { worker: 0 } => {
            seen.snapshots += 1;
            seen.live = false;
            seen.gpu.clear();
        }
        Change::Removed { worker: 0, level: Tier::Gpu, hashes } => {
            hashes.iter().for_each(|hash| assert!(seen.gpu.remove(hash), "{hash} was not held"));
        }
        Change::Stored { worker: 0, level: Tier::Gpu, hashes } => {
            hashes.iter().for_each(|hash| assert!(seen.gpu.insert(*hash), "{hash} was held already"));
        }
        Change::Live { worker: 0, epoch, .. } => (seen.live, seen.epoch) = (true, epoch),
        Change::Load(load) => seen.load = load,
        Change::Resync { worker: 0 } => seen.live = false,
        // The sums are those of a set that was told: the fleet simulation compares them.
        Change::Digest { .. } => {}
        other => panic!("{other:?}"),
    }
}

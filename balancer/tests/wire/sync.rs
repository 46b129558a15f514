//! The sync port against hand-made streams: what hostile or broken sidecars can and cannot do.

use super::support::{Balancer, Script, balancer, hello, say, sidecar};
use fovea_gossip::codec::Decoder;
use fovea_gossip::message::{Delta, FromBalancer, FromSidecar, LevelDelta, Snapshot};
use fovea_kv::{SequenceHash, Tier};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

fn hashes(range: std::ops::RangeInclusive<u64>) -> Vec<SequenceHash> {
    range.map(SequenceHash).collect()
}

fn snapshot(hashes: Vec<SequenceHash>) -> FromSidecar {
    FromSidecar::Snapshot(Snapshot { worker: 0, epoch: 1, seq: 5, level: Tier::Gpu, first: true, last: true, hashes })
}

fn delta(seq: u64, stored: Vec<SequenceHash>) -> FromSidecar {
    let mut levels: [LevelDelta; 3] = Default::default();
    levels[0].stored = stored;
    FromSidecar::Delta(Delta { worker: 0, epoch: 1, seq, levels })
}

fn entries(balancer: &Balancer) -> usize {
    balancer.workers.pools().iter().map(|pool| pool.index().entries()).sum()
}

/// The balancer's messages on `link` until `wanted` comes.
async fn hear(link: &mut TcpStream, wanted: FromBalancer) {
    let (mut decoder, mut bytes) = (Decoder::<FromBalancer>::new(), [0; 1024]);
    loop {
        while let Some(message) = decoder.next().unwrap() {
            if message == wanted {
                return;
            }
        }
        let read = tokio::time::timeout(super::support::PATIENCE, link.read(&mut bytes)).await.unwrap().unwrap();
        assert!(read > 0, "the stream ended before {wanted:?}");
        decoder.push(&bytes[..read]);
    }
}

#[tokio::test]
async fn snapshot_and_deltas_fill_the_index_and_are_acknowledged() {
    let balancer = balancer("").await;
    let mut sidecar = sidecar(&balancer, Script::Silent).await;
    hear(&mut sidecar.link, FromBalancer::Welcome(fovea_gossip::message::PROTOCOL)).await;
    say(&mut sidecar.link, &snapshot(hashes(1..=3))).await;
    say(&mut sidecar.link, &delta(6, hashes(4..=5))).await;
    hear(&mut sidecar.link, FromBalancer::Ack { worker: 0, epoch: 1, seq: 6 }).await;
    assert_eq!(entries(&balancer), 5);
}

#[tokio::test]
async fn a_missing_delta_voids_the_worker_and_asks_for_a_snapshot() {
    let balancer = balancer("").await;
    let mut sidecar = sidecar(&balancer, Script::Silent).await;
    say(&mut sidecar.link, &snapshot(hashes(1..=3))).await;
    say(&mut sidecar.link, &delta(9, hashes(4..=5))).await;
    hear(&mut sidecar.link, FromBalancer::Resync { worker: 0 }).await;
    assert_eq!(entries(&balancer), 0);
    say(&mut sidecar.link, &snapshot(hashes(1..=2))).await;
    balancer.until(|balancer| entries(balancer) == 2).await;
}

#[tokio::test]
async fn a_stream_that_ends_takes_its_workers_with_it() {
    let balancer = balancer("").await;
    let mut first = sidecar(&balancer, Script::Silent).await;
    let mut second = sidecar(&balancer, Script::Silent).await;
    say(&mut first.link, &snapshot(hashes(1..=3))).await;
    say(&mut second.link, &snapshot(hashes(1..=2))).await;
    balancer.until(|balancer| entries(balancer) == 5).await;
    drop(first);
    balancer.until(|balancer| balancer.worker_count() == 1 && entries(balancer) == 2).await;
}

#[tokio::test]
async fn another_block_size_is_another_pool() {
    let balancer = balancer("").await;
    let mut sidecar = sidecar(&balancer, Script::Silent).await;
    say(&mut sidecar.link, &snapshot(hashes(1..=3))).await;
    balancer.until(|balancer| entries(balancer) == 3).await;
    say(&mut sidecar.link, &FromSidecar::Hello(hello(&format!("http://{}", sidecar.http), 16))).await;
    hear(&mut sidecar.link, FromBalancer::Resync { worker: 0 }).await;
    assert_eq!((balancer.worker_count(), entries(&balancer)), (1, 0));
}

/// Sends `bytes` on a stream; it must be closed, and counted under `cause`.
async fn check_end(bytes: &[u8], cause: &str) {
    let balancer = balancer("").await;
    let mut link = TcpStream::connect(balancer.sync).await.unwrap();
    link.write_all(bytes).await.unwrap();
    link.shutdown().await.unwrap();
    let _ = link.read_to_end(&mut Vec::new()).await;
    balancer.until(|b| b.metric(&format!(r#"balancer_sync_ends_total{{cause="{cause}"}}"#)) == 1).await;
    assert_eq!(balancer.worker_count(), 0);
}

#[tokio::test]
async fn bad_bytes_end_the_stream_by_name() {
    check_end(b"GET / HTTP/1.1\r\nhost: b\r\n\r\n", "bad_frame").await;
    check_end(&[3, 0, 0, 0, 1, 0, 0x7f], "bad_frame").await;
    check_end(&[3, 0, 0, 0], "broken").await;
    check_end(&[], "closed").await;
    let frame = |message: &FromSidecar| fovea_gossip::codec::encode_sidecar(message).unwrap();
    check_end(&frame(&FromSidecar::Heartbeat), "protocol").await;
    check_end(&frame(&FromSidecar::Hello(hello("ftp://x", 32))), "bad_url").await;
}

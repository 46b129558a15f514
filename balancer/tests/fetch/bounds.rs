//! Bytes, time, pixels, encodings: origins that mean harm cost no more than their bound.

use fovea_balancer::fetch::{Blame, Reason};

use super::support::{Reply, fetcher, ok, origin, png, until, within};

/// Head of a chunked answer.
const CHUNKED: &[u8] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";

fn chunk(bytes: usize) -> Vec<u8> {
    let mut chunk = format!("{bytes:x}\r\n").into_bytes();
    chunk.resize(chunk.len() + bytes, b'x');
    chunk.extend(b"\r\n");
    chunk
}

/// What sockets may swallow beyond what was read.
const SOCKETS: u64 = 16 << 20;

#[tokio::test]
async fn an_endless_body_is_cut_at_the_limit() {
    let origin = origin(|_, _| Reply::Endless(CHUNKED.to_vec(), chunk(64 << 10))).await;
    let tested = fetcher("body_max: 1MiB");
    tested.refuses(&origin.url("/"), Reason::BodyTooLarge).await;
    assert!(*origin.sent.lock().unwrap() < SOCKETS);
    assert!(tested.metrics.bytes.get() <= 1 << 20);
    assert_eq!(tested.metrics.bytes_held.get(), 0);
}

#[tokio::test]
async fn a_gigabyte_is_refused_by_its_length_unread() {
    let head = b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n".to_vec();
    let origin = origin(move |_, _| Reply::Endless(head.clone(), vec![b'x'; 64 << 10])).await;
    let tested = fetcher("");
    tested.refuses(&origin.url("/"), Reason::BodyTooLarge).await;
    assert_eq!(tested.metrics.bytes.get(), 0);
    assert!(*origin.sent.lock().unwrap() < SOCKETS);
}

#[tokio::test]
async fn a_body_until_the_end_of_the_connection_is_bounded_too() {
    let origin = origin(|_, _| Reply::Endless(b"HTTP/1.0 200 OK\r\n\r\n".to_vec(), vec![b'x'; 64 << 10])).await;
    fetcher("body_max: 1MiB").refuses(&origin.url("/"), Reason::BodyTooLarge).await;
}

#[tokio::test]
async fn the_largest_allowed_body_passes_by_length_and_by_chunks() {
    let origin = origin(|_, number| match number {
        0 => ok(&vec![b'x'; 1 << 20]),
        _ => Reply::Raw([CHUNKED, &chunk(1 << 19), &chunk(1 << 19), b"0\r\n\r\n"].concat()),
    })
    .await;
    let tested = fetcher("body_max: 1MiB");
    for _ in 0..2 {
        let fetched = tested.fetches(&origin.url("/")).await;
        assert!(fetched.complete && fetched.bytes.len() == 1 << 20 && fetched.length == Some(1 << 20));
    }
}

#[tokio::test]
async fn origins_that_stop_run_into_the_time_limit() {
    let stalls: &[&[u8]] = &[
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nxx",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ];
    for stall in stalls {
        let origin = origin(|_, _| Reply::Stall(stall.to_vec())).await;
        fetcher("timeout: 150ms").refuses(&origin.url("/"), Reason::Timeout).await;
    }
}

#[tokio::test]
async fn an_endless_trickle_runs_into_the_time_limit() {
    // Empty interim answers never make a head.
    let origin = origin(|_, _| Reply::Endless(vec![], b"HTTP/1.1 102 Processing\r\n\r\n".to_vec())).await;
    fetcher("timeout: 150ms").refuses(&origin.url("/"), Reason::Timeout).await;
}

#[tokio::test]
async fn an_endless_head_is_refused() {
    let origin = origin(|_, _| Reply::Endless(b"HTTP/1.1 200 OK\r\nX: ".to_vec(), vec![b'x'; 4096])).await;
    fetcher("").refuses(&origin.url("/"), Reason::Protocol).await;
}

#[tokio::test]
async fn compressed_answers_are_refused_unread() {
    for coding in [
        "Content-Encoding: gzip",
        "Content-Encoding: identity, gzip",
        "Content-Encoding: br",
        "Transfer-Encoding: gzip, chunked",
    ] {
        let head = format!("HTTP/1.1 200 OK\r\n{coding}\r\n\r\n");
        let origin = origin(move |_, _| Reply::Endless(head.clone().into_bytes(), chunk(1024))).await;
        let tested = fetcher("");
        tested.refuses(&origin.url("/"), Reason::ContentEncoding).await;
        assert_eq!(tested.metrics.bytes.get(), 0);
        assert!(origin.head(0).contains("accept-encoding: identity"));
    }
}

#[tokio::test]
async fn too_many_pixels_are_refused_by_the_header() {
    let origin = origin(|head, _| match head.split_whitespace().nth(1) {
        Some("/most") => ok(&png(8000, 8000, 10)),
        Some("/more") => ok(&png(8001, 8000, 10)),
        Some("/damaged") => ok(&[&png(60_000, 60_000, 10)[..29], b"nonsense"].concat()),
        _ => ok(&png(60_000, 60_000, 10)),
    })
    .await;
    let tested = fetcher("");
    assert_eq!(tested.fetches(&origin.url("/most")).await.header.unwrap().upright(), (8000, 8000));
    tested.refuses(&origin.url("/more"), Reason::Pixels).await;
    tested.refuses(&origin.url("/bomb"), Reason::Pixels).await;
    tested.refuses(&origin.url("/damaged"), Reason::Pixels).await;
    assert_eq!(within(tested.fetcher.look(&origin.url("/bomb"))).await.unwrap_err().cause, Reason::Pixels);
}

#[tokio::test]
async fn only_success_is_a_file() {
    for status in [
        "204 No Content",
        "206 Partial Content",
        "304 Not Modified",
        "404 Not Found",
        "500 Oops",
        "101 Switching Protocols",
    ] {
        let origin =
            origin(move |_, _| Reply::Raw(format!("HTTP/1.1 {status}\r\nConnection: close\r\n\r\n").into_bytes()))
                .await;
        fetcher("").refuses(&origin.url("/"), Reason::Status).await;
    }
}

#[tokio::test]
async fn broken_answers_are_refused() {
    let broken: &[&[u8]] = &[
        b"",
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nxx",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nxx",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ];
    for bytes in broken {
        let origin = origin(|_, _| Reply::Raw(bytes.to_vec())).await;
        fetcher("").refuses(&origin.url("/"), Reason::Protocol).await;
    }
}

#[tokio::test]
async fn a_closed_port_is_a_failed_connection() {
    let address = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap()
    };
    fetcher("").refuses(&format!("http://{address}/"), Reason::Connect).await;
}

#[tokio::test]
async fn fetched_bytes_count_until_they_are_dropped() {
    let origin = origin(|_, _| ok(&[b'x'; 100 << 10])).await;
    let tested = fetcher("body_max: 128KiB, cache_max: 0B, bytes_max: 128KiB, timeout: 2s");
    let held = tested.fetches(&origin.url("/1")).await;
    assert_eq!(tested.metrics.bytes_held.get(), 100 << 10);
    let error = within(tested.fetcher.fetch(&origin.url("/2"))).await.unwrap_err();
    assert_eq!((error.cause, error.blame(), error.http_status()), (Reason::Busy, Blame::Us, 503));
    let copy = held.bytes.clone();
    drop(held);
    assert_eq!(tested.metrics.bytes_held.get(), 100 << 10);
    drop(copy);
    assert_eq!(tested.metrics.bytes_held.get(), 0);
    tested.fetches(&origin.url("/3")).await;
}

#[tokio::test]
async fn a_host_serves_so_many_at_a_time() {
    let origin = origin(|_, _| Reply::Gated(Box::new(ok(b"file")))).await;
    let tested = fetcher("per_host_max: 2");
    let fetches: Vec<_> = (0..6)
        .map(|n| {
            let (fetcher, url) = (tested.fetcher.clone(), origin.url(&format!("/{n}")));
            tokio::spawn(async move { fetcher.fetch(&url).await.map(|_| ()) })
        })
        .collect();
    for done in 0..6 {
        until(|| origin.count() >= (done + 2).min(6)).await;
        origin.gate.add_permits(1);
    }
    for fetch in fetches {
        within(fetch).await.unwrap().unwrap();
    }
    assert_eq!(origin.busy.lock().unwrap().1, 2);
}

//! Equal fetches at one time.

use fovea_balancer::fetch::{Reason, Source};

use super::support::{Reply, fetcher, ok, origin, until, within};

#[tokio::test]
async fn equal_urls_at_one_time_share_one_exchange() {
    let origin = origin(|_, _| Reply::Gated(Box::new(ok(b"file")))).await;
    let tested = fetcher("");
    let fetches: Vec<_> = (0..8)
        .map(|n| {
            let (fetcher, url) = (tested.fetcher.clone(), origin.url(&format!("/a#{n}")));
            tokio::spawn(async move { fetcher.fetch(&url).await.unwrap() })
        })
        .collect();
    until(|| tested.metrics.shared.get() == 7 && origin.count() == 1).await;
    origin.gate.add_permits(8);
    for fetch in fetches {
        let fetched = within(fetch).await.unwrap();
        assert_eq!((&fetched.bytes[..], fetched.source), (&b"file"[..], Source::Origin));
    }
    assert_eq!(origin.count(), 1);
    // Done is done: the next asks again.
    tested.fetches(&origin.url("/a")).await;
    assert_eq!(origin.count(), 2);
}

#[tokio::test]
async fn a_first_that_leaves_takes_nothing_from_the_others() {
    let origin = origin(|_, _| Reply::Gated(Box::new(ok(b"file")))).await;
    let tested = fetcher("");
    let spawn = || {
        let (fetcher, url) = (tested.fetcher.clone(), origin.url("/a"));
        tokio::spawn(async move { fetcher.fetch(&url).await.unwrap() })
    };
    let first = spawn();
    until(|| origin.count() == 1).await;
    let second = spawn();
    until(|| tested.metrics.shared.get() == 1).await;
    first.abort();
    assert!(within(first).await.is_err());
    origin.gate.add_permits(1);
    assert_eq!(&within(second).await.unwrap().bytes[..], b"file");
    assert_eq!(origin.count(), 1);
}

#[tokio::test]
async fn a_fetch_that_nobody_waits_for_ends() {
    let origin = origin(|_, _| Reply::Gated(Box::new(ok(b"file")))).await;
    let tested = fetcher("per_host_max: 1");
    let (fetcher, url) = (tested.fetcher.clone(), origin.url("/a"));
    let alone = tokio::spawn(async move { fetcher.fetch(&url).await.unwrap() });
    until(|| origin.count() == 1).await;
    alone.abort();
    assert!(within(alone).await.is_err());
    origin.gate.add_permits(2);
    // The only place is free again.
    tested.fetches(&origin.url("/b")).await;
}

#[tokio::test]
async fn a_shared_failure_counts_for_each_that_met_it() {
    let origin = origin(|_, _| Reply::Gated(Box::new(Reply::Plain("404 Not Found", vec![], vec![])))).await;
    let tested = fetcher("");
    let fetches: Vec<_> = (0..3)
        .map(|_| {
            let (fetcher, url) = (tested.fetcher.clone(), origin.url("/a"));
            tokio::spawn(async move { fetcher.fetch(&url).await.unwrap_err().status })
        })
        .collect();
    until(|| tested.metrics.shared.get() == 2 && origin.count() == 1).await;
    origin.gate.add_permits(1);
    for fetch in fetches {
        assert_eq!(within(fetch).await.unwrap(), Some(404));
    }
    assert_eq!((origin.count(), tested.refusals(Reason::Status)), (1, 3));
}

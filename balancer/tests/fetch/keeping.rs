//! Kept files: used when their origin confirms them or the config says so, never when the content changed.

use fovea_balancer::fetch::Source;

use super::support::{Reply, Scripted, Tested, fetcher, fetcher_with, ok, origin, redirect, tagged};

#[track_caller]
fn same(fetched: &fovea_balancer::fetch::Fetched, bytes: &[u8], source: Source) {
    assert_eq!((&fetched.bytes[..], fetched.source), (bytes, source));
}

fn not_modified() -> Reply {
    Reply::Plain("304 Not Modified", vec![], vec![])
}

#[tokio::test]
async fn a_strong_tag_is_confirmed_each_time() {
    let origin = origin(|head, number| match number {
        0 => tagged("\"v1\"", b"first"),
        _ if head.to_ascii_lowercase().contains("if-none-match: \"v1\"") && number < 3 => not_modified(),
        _ => tagged("\"v2\"", b"other"),
    })
    .await;
    let tested = fetcher("");
    same(&tested.fetches(&origin.url("/a")).await, b"first", Source::Origin);
    same(&tested.fetches(&origin.url("/a")).await, b"first", Source::Revalidated);
    same(&tested.fetches(&origin.url("/a")).await, b"first", Source::Revalidated);
    same(&tested.fetches(&origin.url("/a")).await, b"other", Source::Origin);
    assert_eq!(origin.count(), 4);
}

#[tokio::test]
async fn changed_content_is_seen_whatever_validators_say() {
    let headers: &[&[(&str, &str)]] = &[
        &[],
        &[("ETag", "W/\"same\"")],
        &[("ETag", "same")],
        &[("Last-Modified", "Mon, 01 Jun 2026 00:00:00 GMT")],
        &[("Cache-Control", "max-age=3600")],
        &[("Cache-Control", "no-store"), ("ETag", "\"same\"")],
        &[("Expires", "Mon, 01 Jun 2099 00:00:00 GMT")],
    ];
    for headers in headers {
        let origin = origin(|_, number| {
            let headers = headers.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
            Reply::Plain("200 OK", headers, if number == 0 { b"first".to_vec() } else { b"other".to_vec() })
        })
        .await;
        let tested = fetcher("");
        same(&tested.fetches(&origin.url("/a")).await, b"first", Source::Origin);
        same(&tested.fetches(&origin.url("/a")).await, b"other", Source::Origin);
        assert!(!origin.head(1).contains("if-"), "{headers:?}");
    }
}

#[tokio::test]
async fn within_fresh_for_a_kept_file_needs_no_origin() {
    let rows: &[(&str, Source)] = &[
        ("max-age=600", Source::Cache),
        ("public", Source::Cache),
        ("no-store", Source::Origin),
        ("private", Source::Origin),
        ("no-cache", Source::Origin),
        ("max-age=0", Source::Origin),
    ];
    for (control, source) in rows {
        let origin =
            origin(|_, _| Reply::Plain("200 OK", vec![("Cache-Control", (*control).to_owned())], b"file".to_vec()))
                .await;
        let tested = fetcher("fresh_for: 1h");
        same(&tested.fetches(&origin.url("/a")).await, b"file", Source::Origin);
        same(&tested.fetches(&origin.url("/a")).await, b"file", *source);
        // Another query is another file.
        same(&tested.fetches(&origin.url("/a?b")).await, b"file", Source::Origin);
    }
}

#[tokio::test]
async fn a_tag_is_sent_only_to_the_url_it_came_from() {
    let origin = origin(|head, number| match (head.split_whitespace().nth(1), number) {
        (Some("/moving"), 0) => redirect("/one"),
        (Some("/moving"), _) => redirect("/two"),
        (Some("/one"), _) => tagged("\"1\"", b"one"),
        _ if head.to_ascii_lowercase().contains("if-none-match") => not_modified(),
        _ => tagged("\"1\"", b"two"),
    })
    .await;
    let tested = fetcher("");
    same(&tested.fetches(&origin.url("/moving")).await, b"one", Source::Origin);
    same(&tested.fetches(&origin.url("/moving")).await, b"two", Source::Origin);
}

#[tokio::test]
async fn what_is_kept_is_bounded() {
    let origin = origin(|_, _| Reply::Plain("200 OK", vec![], vec![b'x'; 10 << 10])).await;
    let tested = fetcher("fresh_for: 1h, cache_max: 64KiB");
    for n in 0..50 {
        tested.fetches(&origin.url(&format!("/{n}"))).await;
    }
    assert!((1..=64 << 10).contains(&tested.metrics.bytes_held.get()), "{}", tested.metrics.bytes_held.get());
}

#[tokio::test]
async fn a_kept_file_is_no_way_around_a_name_that_turned_private() {
    let origin = origin(|_, _| tagged("\"1\"", b"file")).await;
    let answers: &[&[&str]] = &[&["127.0.0.1"], &["10.0.0.1"]];
    let tested: Tested =
        fetcher_with("{allow: [127.0.0.1/32], ports: []}", Scripted::new(&[("rebound.example", answers)]));
    let url = format!("http://rebound.example:{}/", origin.address.port());
    tested.fetches(&url).await;
    tested.refuses(&url, fovea_balancer::fetch::Reason::Address).await;
}

#[tokio::test]
async fn an_unasked_304_is_no_file() {
    let origin = origin(|_, number| if number == 0 { ok(b"file") } else { not_modified() }).await;
    let tested = fetcher("");
    tested.fetches(&origin.url("/a")).await;
    tested.refuses(&origin.url("/a"), fovea_balancer::fetch::Reason::Status).await;
}

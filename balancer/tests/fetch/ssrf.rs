//! What clients must not reach: addresses by every spelling, names, rebinding, redirects.

use fovea_balancer::fetch::{Fetcher, MediaMetrics, Reason};
use prometheus_client::registry::Registry;

use super::support::{Scripted, fetcher, fetcher_with, ok, origin, redirect, section, within};

#[tokio::test]
async fn every_form_of_a_closed_address_is_refused_by_default() {
    let tested = fetcher_with("{}", Scripted::new(&[]));
    for host in [
        "127.0.0.1",
        "127.255.255.254",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.0.1",
        "100.64.0.1",
        "100.100.100.200",
        "169.254.169.254",
        "169.254.1.1",
        "168.63.129.16",
        "192.0.0.192",
        "192.0.2.1",
        "198.18.0.1",
        "198.51.100.1",
        "203.0.113.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "[::]",
        "[::1]",
        "[fd00:ec2::254]",
        "[fd00::1]",
        "[fe80::1]",
        "[fec0::1]",
        "[ff02::1]",
        "[::127.0.0.1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::ffff:169.254.169.254]",
        "[::ffff:0:10.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[64:ff9b::169.254.169.254]",
        "[64:ff9b:1::10.0.0.1]",
        "[2002:7f00:1::]",
        "[2002:a9fe:a9fe::1]",
        "[2001:0:7f00:1::]",
        "[2001:0:808:808:0:0:80ff:fffe]",
        "[2001:db8::1]",
        "[100::1]",
        "[3fff::1]",
        "[5f00::1]",
    ] {
        tested.refuses(&format!("http://{host}/latest/meta-data/"), Reason::Address).await;
        tested.refuses(&format!("https://{host}/"), Reason::Address).await;
    }
}

#[tokio::test]
async fn every_other_spelling_and_scheme_is_refused_by_default() {
    let tested = fetcher_with("{}", Scripted::new(&[]));
    for host in [
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "0177.0.0.1",
        "017700000001",
        "127.1",
        "127.0.0.1.",
        "0",
        "%31%32%37.0.0.1",
        "①②⑦.0.0.1",
    ] {
        tested.refuses(&format!("http://{host}/"), Reason::HostForm).await;
    }
    for (url, reason) in [
        ("http://user@example.com/", Reason::Userinfo),
        ("http://127.0.0.1:22/", Reason::Port),
        ("http://example.com:6379/", Reason::Port),
        ("file:///etc/passwd", Reason::Scheme),
        ("gopher://127.0.0.1/", Reason::Scheme),
        ("http://127.0.0.1\\@example.com/", Reason::BadUrl),
        ("http://exa\tmple.com/", Reason::BadUrl),
        ("//127.0.0.1/", Reason::BadUrl),
        ("", Reason::BadUrl),
    ] {
        tested.refuses(url, reason).await;
    }
}

#[tokio::test]
async fn every_answer_for_a_name_counts() {
    let names: &[(&str, &[&[&str]])] = &[
        ("localhost", &[&["127.0.0.1", "::1"]]),
        ("metadata.google.internal", &[&["169.254.169.254"]]),
        ("kubernetes.default.svc", &[&["10.96.0.1"]]),
        ("mixed.example", &[&["8.8.8.8", "10.0.0.1"]]),
        ("mixed6.example", &[&["2606:4700::1111", "fd00:ec2::254"]]),
        ("mapped.example", &[&["::ffff:127.0.0.1"]]),
        ("nat64.example", &[&["64:ff9b::a9fe:a9fe"]]),
        ("nowhere.example", &[&[]]),
    ];
    let tested = fetcher_with("{}", Scripted::new(names));
    for (name, _) in names.iter().filter(|(name, _)| !name.starts_with("nowhere")) {
        tested.refuses(&format!("http://{name}/a.png"), Reason::Address).await;
    }
    tested.refuses("http://nowhere.example/", Reason::Dns).await;
    tested.refuses("http://unknown.example/", Reason::Dns).await;
}

#[tokio::test]
async fn a_name_is_asked_once_and_dialled_where_it_was_checked() {
    let origin = origin(|_, _| ok(b"file")).await;
    let answers: &[&[&str]] = &[&["127.0.0.1"], &["10.0.0.1"]];
    let resolver = Scripted::new(&[("rebound.example", answers)]);
    let tested = fetcher_with("{allow: [127.0.0.1/32], ports: []}", resolver.clone());
    let url = format!("http://rebound.example:{}/", origin.address.port());
    let fetched = tested.fetches(&url).await;
    assert_eq!((&fetched.bytes[..], fetched.address), (&b"file"[..], origin.address));
    assert_eq!(resolver.asked.lock().unwrap().len(), 1);
    tested.refuses(&url, Reason::Address).await;
    assert_eq!(origin.count(), 1);
}

#[tokio::test]
async fn a_name_that_turns_private_between_hops_is_refused() {
    let origin = origin(|_, _| redirect("/again")).await;
    let answers: &[&[&str]] = &[&["127.0.0.1"], &["10.0.0.1"]];
    let tested = fetcher_with("{allow: [127.0.0.1/32], ports: []}", Scripted::new(&[("rebound.example", answers)]));
    tested.refuses(&format!("http://rebound.example:{}/", origin.address.port()), Reason::Address).await;
    assert_eq!(origin.count(), 1);
}

#[tokio::test]
async fn redirects_are_checked_like_urls() {
    let target = origin(|_, _| ok(b"secret")).await;
    let port = target.address.port();
    for (location, reason) in [
        (format!("http://127.0.0.2:{port}/"), Reason::Address),
        (format!("//127.0.0.2:{port}/"), Reason::Address),
        ("http://169.254.169.254/latest/".to_owned(), Reason::Address),
        ("http://[::ffff:169.254.169.254]/".to_owned(), Reason::Address),
        (format!("http://2130706433:{port}/"), Reason::HostForm),
        (format!("http://u@127.0.0.1:{port}/"), Reason::Userinfo),
        ("file:///etc/passwd".to_owned(), Reason::Scheme),
        ("http:\\\\127.0.0.2\\".to_owned(), Reason::Redirect),
        ("http://unknown.example/".to_owned(), Reason::Dns),
    ] {
        let origin = origin(move |_, _| redirect(&location)).await;
        let tested = fetcher("");
        tested.refuses(&origin.url("/"), reason).await;
    }
    assert_eq!(target.count(), 0);
}

#[tokio::test]
async fn a_redirect_to_another_port_is_refused_where_ports_are_listed() {
    let target = origin(|_, _| ok(b"secret")).await;
    let location = target.url("/");
    let origin = origin(move |_, _| redirect(&location)).await;
    let config = format!("{{allow: [127.0.0.0/8], ports: [{}]}}", origin.address.port());
    let tested = fetcher_with(&config, Scripted::new(&[]));
    tested.refuses(&origin.url("/"), Reason::Port).await;
    assert_eq!(target.count(), 0);
}

#[tokio::test]
async fn three_redirects_are_followed_and_a_fourth_is_not() {
    let origin = origin(|head, _| match head.split_whitespace().nth(1) {
        Some("/0") => ok(b"end"),
        Some(path) => redirect(&format!("/{}", path[1..].parse::<u32>().unwrap() - 1)),
        None => ok(b""),
    })
    .await;
    let tested = fetcher("");
    assert_eq!(&tested.fetches(&origin.url("/3")).await.bytes[..], b"end");
    tested.refuses(&origin.url("/4"), Reason::Redirect).await;
}

#[tokio::test]
async fn redirects_without_a_place_are_refused() {
    let origin = origin(|_, number| match number {
        0 => super::support::Reply::Plain("302 Found", vec![], vec![]),
        _ => redirect("http://"),
    })
    .await;
    let tested = fetcher("");
    tested.refuses(&origin.url("/"), Reason::Redirect).await;
    tested.refuses(&origin.url("/"), Reason::Redirect).await;
}

#[tokio::test]
async fn nothing_is_dialled_when_turned_off() {
    let origin = origin(|_, _| ok(b"file")).await;
    fetcher("enabled: false").refuses(&origin.url("/"), Reason::Disabled).await;
    assert_eq!(origin.count(), 0);
}

#[tokio::test]
async fn the_systems_resolver_is_checked_too() {
    let origin = origin(|head, _| ok(head.split_whitespace().nth(1).unwrap_or_default().as_bytes())).await;
    let url = format!("http://localhost:{}/a%20b?c=d|e", origin.address.port());
    let fetched = |config: &str| {
        let metrics = MediaMetrics::register(&mut Registry::default());
        let (fetcher, url) = (Fetcher::new(&section(config), metrics).unwrap(), url.clone());
        async move { within(fetcher.fetch(&url)).await.map(|fetched| fetched.bytes) }
    };
    assert_eq!(fetched("{ports: []}").await.unwrap_err().cause, Reason::Address);
    // The origin listens at the IPv4 address alone, whichever comes first.
    assert_eq!(&fetched("{allow: [127.0.0.0/8, '::1/128'], ports: []}").await.unwrap()[..], b"/a%20b?c=d|e");
}

#[tokio::test]
async fn clients_read_a_rule_and_never_an_address() {
    let origin = origin(|_, _| redirect("http://169.254.169.254/secret")).await;
    let tested = fetcher("");
    let url = origin.url("/");
    let got = within(tested.fetcher.fetch_parts(&[(0, "http://10.1.2.3/"), (3, &url)])).await;
    let texts: Vec<_> = got.into_iter().map(|got| got.unwrap_err().to_string()).collect();
    assert!(texts[0].starts_with("media part 0: ") && texts[1].starts_with("media part 3: "), "{texts:?}");
    assert!(texts.iter().all(|text| text.contains("(address)")), "{texts:?}");
    assert!(
        texts.iter().all(|text| !text.contains("10.1") && !text.contains("169.") && !text.contains("127.")),
        "{texts:?}"
    );
}

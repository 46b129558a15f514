//! TLS and the shared key between the real programs: who proves himself is served, who does not is told why.

#![expect(clippy::unwrap_used, reason = "helpers of tests: a failure is the test's")]

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use e2e::certs::Authority;
use e2e::workload::four_pictures;
use e2e::{Fleet, FleetConfig, Mode, Program, eventually, tiny_model};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

const LIMIT: Duration = Duration::from_secs(30);

struct Pki {
    dir: tempfile::TempDir,
    ours: Authority,
}

fn pki() -> Pki {
    let dir = tempfile::tempdir().unwrap();
    let ours = Authority::new(dir.path(), "ours").unwrap();
    ours.certify("balancer", &["127.0.0.1", "spiffe://fovea/balancer"]).unwrap();
    ours.certify("sidecar", &["127.0.0.1", "spiffe://fovea/sidecar"]).unwrap();
    Pki { dir, ours }
}

/// Certificates everywhere, and no other trust.
fn mutual(pki: &Pki, workers: usize) -> FleetConfig {
    let (ca, balancer, sidecar) = (pki.ours.ca(), pki.ours.pair("balancer"), pki.ours.pair("sidecar"));
    FleetConfig {
        balancer_extra: format!(
            "sync_tls: {{{balancer}, {ca}, client_auth: required, allowed_names: ['spiffe://fovea/sidecar']}}\n\
             sidecar_tls: {{{balancer}, {ca}}}\n"
        ),
        trust: "trust: {loopback: false}",
        sidecar_extra: format!(
            "tls: {{{sidecar}, {ca}, client_auth: required, allowed_names: ['spiffe://fovea/balancer']}}\n\
             gossip: {{tls: {{{sidecar}, {ca}}}}}\n"
        ),
        ..FleetConfig::tiny(workers, Mode::Precise)
    }
}

/// Value of one line of a program's metrics; 0 when it is not there.
async fn metric(fleet: &Fleet, program: &Program, name: &str) -> u64 {
    let page = fleet.client.get(&format!("http://{}/metrics", program.addr("admin").unwrap())).await.unwrap();
    let page = String::from_utf8_lossy(&page.body).into_owned();
    page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok()).unwrap_or(0)
}

async fn wait_for(fleet: &Fleet, program: &Program, name: &str, least: u64) {
    let counted = || async { Ok((metric(fleet, program, name).await >= least).then_some(())) };
    eventually(&format!("{name} >= {least}"), LIMIT, counted).await.unwrap();
}

#[tokio::test]
async fn certificates_alone_are_trust_enough_and_connections_are_kept() {
    let pki = pki();
    let fleet = Fleet::start(mutual(&pki, 2)).await.unwrap();
    let url = fleet.chat_url().unwrap();
    for turn in 0..12 {
        let answer = fleet.client.stream(&url, four_pictures(turn % 2)).await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.header("x-fovea-view")), (200, "exact"), "{}", answer.text);
        fleet.settled().await.unwrap();
    }
    // Predictions were believed: their preambles were.
    assert_eq!(fleet.judged(12).await.unwrap().keys().collect::<Vec<_>>(), ["exact"]);
    assert_eq!(metric(&fleet, &fleet.balancer, r#"balancer_sync_opened_total{proven="certificate"}"#).await, 2);
    let mut handshakes = 0;
    for sidecar in &fleet.sidecars {
        handshakes += metric(&fleet, sidecar, r#"sidecar_tls_handshakes_total{link="tls",end="done"}"#).await;
    }
    assert!((1..=2).contains(&handshakes), "{handshakes} handshakes for 12 requests to 2 sidecars");
}

#[tokio::test]
async fn new_certificates_are_taken_without_a_restart_and_broken_ones_are_not() {
    let pki = pki();
    let fleet = Fleet::start(mutual(&pki, 1)).await.unwrap();
    let (url, sidecar) = (fleet.chat_url().unwrap(), &fleet.sidecars[0]);
    let ask = async || fleet.client.stream(&url, four_pictures(1)).await.unwrap().status.as_u16();
    assert_eq!(ask().await, 200);
    // Broken, in all four places: the old ones go on.
    let balancer_pem = pki.dir.path().join("balancer.pem");
    std::fs::write(&balancer_pem, "not PEM").unwrap();
    for link in ["sync_tls", "sidecar_tls"] {
        let failed = format!(r#"balancer_tls_reloads_total{{link="{link}",end="failed"}}"#);
        wait_for(&fleet, &fleet.balancer, &failed, 1).await;
    }
    assert_eq!(ask().await, 200);
    // Whole again, of another name: the sidecar does not take it for the balancer any more.
    pki.ours.certify("balancer", &["127.0.0.1", "spiffe://fovea/other"]).unwrap();
    wait_for(&fleet, &fleet.balancer, r#"balancer_tls_reloads_total{link="sidecar_tls",end="replaced"}"#, 1).await;
    assert_eq!(ask().await, 502);
    let refused = r#"sidecar_tls_handshakes_total{link="tls",end="wrong_name"}"#;
    assert!(metric(&fleet, sidecar, refused).await >= 1);
    pki.ours.certify("balancer", &["127.0.0.1", "spiffe://fovea/balancer"]).unwrap();
    eventually("new certificates serve", LIMIT, || async { Ok((ask().await == 200).then_some(())) }).await.unwrap();
    let expires = r#"balancer_tls_certificate_expires_seconds{link="sync_tls"}"#;
    assert!(metric(&fleet, &fleet.balancer, expires).await > 4_000_000_000);
}

#[tokio::test]
async fn strangers_are_refused_at_both_ports() {
    let pki = pki();
    let theirs = Authority::new(pki.dir.path(), "theirs").unwrap();
    theirs.certify("stranger", &["127.0.0.1", "spiffe://fovea/sidecar"]).unwrap();
    let mut fleet = Fleet::start(mutual(&pki, 1)).await.unwrap();
    let (sync, engine) = (fleet.balancer.addr("sync").unwrap(), fleet.engines[0].addr("http").unwrap());
    let ca = pki.ours.ca();
    // No certificate, a certificate of another authority, no TLS at all.
    for (name, tls, cause, sees) in [
        ("none", format!("gossip: {{tls: {{{ca}}}}}"), "no_certificate", "tls"),
        ("other", format!("gossip: {{tls: {{{ca}, {}}}}}", theirs.pair("stranger")), "unknown_issuer", "tls"),
        ("plain", String::new(), "not_tls", ""),
    ] {
        let yaml = format!(
            "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nbalancers: [\"{sync}\"]\nengine: {{url: 'http://{engine}'}}\n{tls}\n"
        );
        let sidecar = start_sidecar(&fleet, name, &yaml).await;
        let refused = format!(r#"balancer_tls_handshakes_total{{link="sync_tls",end="{cause}"}}"#);
        wait_for(&fleet, &fleet.balancer, &refused, 1).await;
        match sees {
            "" => wait_for(&fleet, &sidecar, "sidecar_gossip_dials_failed_total", 1).await,
            sees => {
                wait_for(&fleet, &sidecar, &format!(r#"sidecar_gossip_refused_total{{cause="{sees}"}}"#), 1).await;
            }
        }
    }
    fleet.wait_for_workers(1).await.unwrap();
    // A client that goes around the balancer has no certificate.
    let sidecar = fleet.sidecars.pop().unwrap();
    let mut stream = TcpStream::connect(sidecar.addr("http").unwrap()).await.unwrap();
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert!(!answer.starts_with(b"HTTP/"), "{answer:?}");
}

async fn start_sidecar(fleet: &Fleet, name: &str, yaml: &str) -> Program {
    let path = fleet.dir().join(format!("{name}.yaml"));
    std::fs::write(&path, yaml).unwrap();
    let args = ["run".to_owned(), "--config".to_owned(), path.display().to_string()];
    Program::start("fovea-sidecar", &args, &fleet.dir().join(format!("{name}.log"))).await.unwrap()
}

/// A balancer and a sidecar with these `trust` lines: how the balancer counts the stream, and what the sidecar counts.
async fn check_keys(balancer: &str, sidecar: &str, at_balancer: &str, at_sidecar: &str) {
    let config = FleetConfig {
        balancer_extra: format!("trust: {{shared_key: '{balancer}'}}\n"),
        ..FleetConfig::tiny(0, Mode::Precise)
    };
    let fleet = Fleet::start(config).await.unwrap();
    let engine = fleet.start_engine(0, 0).await.unwrap();
    let (sync, engine) = (fleet.balancer.addr("sync").unwrap(), engine.addr("http").unwrap());
    let yaml = format!(
        "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nbalancers: [\"{sync}\"]\nengine: {{url: 'http://{engine}'}}\ntrust: {{shared_key: '{sidecar}'}}\n"
    );
    let program = start_sidecar(&fleet, "sidecar", &yaml).await;
    wait_for(&fleet, &fleet.balancer, at_balancer, 1).await;
    wait_for(&fleet, &program, at_sidecar, 1).await;
    for log in ["balancer.log", "sidecar.log"] {
        let log = std::fs::read_to_string(fleet.dir().join(log)).unwrap();
        assert!(!log.contains("s3cret"), "{log}");
    }
}

#[tokio::test]
async fn equal_keys_open_the_stream_and_all_others_are_told_why() {
    let streams = "sidecar_gossip_streams";
    check_keys("s3cret", "s3cret", r#"balancer_sync_opened_total{proven="key"}"#, streams).await;
    check_keys("", "", r#"balancer_sync_opened_total{proven="nothing"}"#, streams).await;
    let ends = |cause: &str| format!(r#"balancer_sync_ends_total{{cause="{cause}"}}"#);
    let refused = |cause: &str| format!(r#"sidecar_gossip_refused_total{{cause="{cause}"}}"#);
    check_keys("s3cret", "", &ends("key_missing"), &refused("key_missing")).await;
    check_keys("", "s3cret", &ends("no_key_here"), &refused("no_key_there")).await;
    check_keys("s3cret", "s3cret2", &ends("wrong_key"), &refused("wrong_key")).await;
}

/// A connection to the front with this ALPN offer, and what was agreed on.
async fn dial(pki: &Pki, at: &str, protocols: &[&[u8]]) -> tokio_rustls::client::TlsStream<TcpStream> {
    let mut roots = RootCertStore::empty();
    for root in CertificateDer::pem_file_iter(pki.dir.path().join("ours-ca.pem")).unwrap() {
        roots.add(root.unwrap()).unwrap();
    }
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    let name = ServerName::try_from("127.0.0.1").unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, TcpStream::connect(at).await.unwrap()).await.unwrap()
}

#[tokio::test]
async fn clients_are_served_over_tls_by_the_protocol_that_they_choose() {
    let pki = pki();
    let tls = format!("tls: {{{}, handshake_timeout: 300ms}}\n", pki.ours.pair("balancer"));
    let config = FleetConfig { balancer_extra: tls, ..FleetConfig::tiny(1, Mode::Precise) };
    let fleet = Fleet::start(config).await.unwrap();
    let at = fleet.balancer.addr("http").unwrap();
    let body = json!({"model": "tiny-vl", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1});
    // Over HTTP/2 the URI has the host, and another one beside it is refused.
    let request = |uri: String| {
        let request = http::Request::post(&uri).header("content-type", "application/json");
        let request = if uri.starts_with('/') { request.header("host", "balancer") } else { request };
        request.body(Full::new(Bytes::from(body.to_string()))).unwrap()
    };
    let stream = dial(&pki, &at, &[b"h2", b"http/1.1"]).await;
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (mut send, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    for _ in 0..3 {
        let answer = send.send_request(request(format!("https://{at}/v1/chat/completions"))).await.unwrap();
        let (head, body) = answer.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        assert_eq!((head.status.as_u16(), head.version), (200, http::Version::HTTP_2), "{body:?}");
    }
    for offer in [&[&b"http/1.1"[..]][..], &[]] {
        let stream = dial(&pki, &at, offer).await;
        let (mut send, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        for _ in 0..3 {
            let answer = send.send_request(request("/v1/chat/completions".to_owned())).await.unwrap();
            assert_eq!((answer.status().as_u16(), answer.version()), (200, http::Version::HTTP_11));
            answer.into_body().collect().await.unwrap();
            send.ready().await.unwrap();
        }
    }
    // Who does not go on with his handshake, or speaks no TLS, is closed.
    for (bytes, end) in [(&b"\x16"[..], "timed_out"), (b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", "not_tls")] {
        let mut slow = TcpStream::connect(&at).await.unwrap();
        slow.write_all(bytes).await.unwrap();
        let mut answer = Vec::new();
        let ended = tokio::time::timeout(LIMIT, slow.read_to_end(&mut answer)).await;
        assert!(ended.is_ok() && !answer.starts_with(b"HTTP/"), "{end}: {answer:?}");
        let counted = format!(r#"balancer_tls_handshakes_total{{link="tls",end="{end}"}}"#);
        wait_for(&fleet, &fleet.balancer, &counted, 1).await;
    }
}

#[tokio::test]
async fn model_files_come_over_tls_too() {
    let pki = pki();
    let base = mutual(&pki, 1);
    let sidecar_extra = format!("{}model: {{dir: '{}'}}\n", base.sidecar_extra, tiny_model().display());
    let fleet = Fleet::start(FleetConfig { balancer_has_model: false, sidecar_extra, ..base }).await.unwrap();
    wait_for(&fleet, &fleet.balancer, "balancer_models_pulled", 1).await;
}

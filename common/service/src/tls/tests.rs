use std::path::{Path, PathBuf};
use std::time::Duration;

use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

use super::client::ClientTls;
use super::config::{ClientAuth, ClientTlsConfig, ServerTlsConfig};
use super::handshake::end_of;
use super::metrics::{HandshakeEnd, HandshakeLabels, LinkLabels, TlsMetrics};
use super::reload::{Looked, Watched};
use super::server::ServerTls;
use crate::config::Validate;

const ALPN: &[&[u8]] = &[b"fovea/1"];

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    dir: PathBuf,
}

impl Authority {
    /// An authority whose certificate lies in `dir/NAME-ca.pem`.
    fn new(dir: &Path, name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        std::fs::write(dir.join(format!("{name}-ca.pem")), params.self_signed(&key).unwrap().pem()).unwrap();
        Self { issuer: Issuer::new(params, key), dir: dir.to_owned() }
    }

    /// A certificate in `dir/NAME.pem` and `dir/NAME.key`.
    fn certify(&self, name: &str, names: &[&str], expired: bool) {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.subject_alt_names = names
            .iter()
            .map(|name| match name.starts_with("spiffe:") {
                true => SanType::URI((*name).try_into().unwrap()),
                false => SanType::DnsName((*name).try_into().unwrap()),
            })
            .collect();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.not_after = if expired { rcgen::date_time_ymd(2001, 1, 1) } else { rcgen::date_time_ymd(4000, 1, 1) };
        let key = KeyPair::generate().unwrap();
        let signed = params.signed_by(&key, &self.issuer).unwrap();
        std::fs::write(self.dir.join(format!("{name}.pem")), signed.pem()).unwrap();
        std::fs::write(self.dir.join(format!("{name}.key")), key.serialize_pem()).unwrap();
    }
}

fn server_config(dir: &Path, name: &str, ca: Option<&str>, allowed: &[&str]) -> ServerTlsConfig {
    ServerTlsConfig {
        cert_file: dir.join(format!("{name}.pem")),
        key_file: dir.join(format!("{name}.key")),
        ca_file: ca.map(|ca| dir.join(format!("{ca}-ca.pem"))),
        client_auth: if ca.is_some() { ClientAuth::Required } else { ClientAuth::None },
        allowed_names: allowed.iter().map(|name| (*name).to_owned()).collect(),
        handshake_timeout: Duration::from_secs(5),
    }
}

fn client_config(dir: &Path, ca: &str, name: Option<&str>, allowed: &[&str]) -> ClientTlsConfig {
    ClientTlsConfig {
        ca_file: dir.join(format!("{ca}-ca.pem")),
        cert_file: name.map(|name| dir.join(format!("{name}.pem"))),
        key_file: name.map(|name| dir.join(format!("{name}.key"))),
        server_name: None,
        allowed_names: allowed.iter().map(|name| (*name).to_owned()).collect(),
    }
}

/// How a handshake ends at the server and at the client; a client hears of a refusal when it reads.
async fn meet(server: &ServerTls, client: &ClientTls, host: &str) -> (HandshakeEnd, HandshakeEnd) {
    let (near, far) = duplex(1 << 16);
    let serve = async {
        match server.accept(far).await {
            Ok(mut stream) => {
                let _ = stream.write_all(b"x").await;
                let _ = stream.shutdown().await;
                HandshakeEnd::Done
            }
            Err(error) => error.end,
        }
    };
    let dial = async {
        match client.connect(host, near).await {
            Ok(mut stream) => match stream.read_u8().await {
                Ok(_) => HandshakeEnd::Done,
                Err(error) => end_of(&error),
            },
            Err(error) => error.end,
        }
    };
    tokio::join!(serve, dial)
}

struct World {
    dir: tempfile::TempDir,
    metrics: TlsMetrics,
}

impl World {
    /// Two authorities; balancer and sidecar of the first, a stranger of the second.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (ours, theirs) = (Authority::new(dir.path(), "ours"), Authority::new(dir.path(), "theirs"));
        ours.certify("balancer", &["balancer.svc", "spiffe://fovea/balancer"], false);
        ours.certify("sidecar", &["sidecar.svc", "spiffe://fovea/sidecar"], false);
        ours.certify("expired", &["sidecar.svc"], true);
        theirs.certify("stranger", &["balancer.svc", "spiffe://fovea/sidecar"], false);
        Self { dir, metrics: TlsMetrics::default() }
    }

    fn server(&self, name: &str, ca: Option<&str>, allowed: &[&str]) -> ServerTls {
        ServerTls::load("sync_tls", &server_config(self.dir.path(), name, ca, allowed), ALPN, &self.metrics).unwrap()
    }

    fn client(&self, ca: &str, name: Option<&str>, allowed: &[&str]) -> ClientTls {
        ClientTls::load("gossip.tls", &client_config(self.dir.path(), ca, name, allowed), ALPN, &self.metrics).unwrap()
    }
}

/// The server's authority for clients and its list; the client's certificate, list and host; the end at the server and at the client.
type Row<'a> = (Option<&'a str>, &'a [&'a str], Option<&'a str>, &'a [&'a str], &'a str, HandshakeEnd, HandshakeEnd);

#[tokio::test]
async fn peers_are_believed_by_chain_and_name() {
    use HandshakeEnd::{Done, Expired, NoCertificate, RefusedByPeer, UnknownIssuer, WrongName};
    let world = World::new();
    let rows: [Row; 11] = [
        (None, &[], None, &[], "balancer.svc", Done, Done),
        (None, &[], None, &[], "other.svc", RefusedByPeer, WrongName),
        (None, &[], None, &["spiffe://fovea/balancer"], "10.0.0.1", Done, Done),
        (None, &[], None, &["spiffe://fovea/sidecar"], "balancer.svc", RefusedByPeer, WrongName),
        (Some("ours"), &[], Some("sidecar"), &[], "balancer.svc", Done, Done),
        (Some("ours"), &[], None, &[], "balancer.svc", NoCertificate, RefusedByPeer),
        (Some("ours"), &[], Some("stranger"), &[], "balancer.svc", UnknownIssuer, RefusedByPeer),
        (Some("ours"), &[], Some("expired"), &[], "balancer.svc", Expired, RefusedByPeer),
        (Some("ours"), &["spiffe://fovea/sidecar"], Some("sidecar"), &[], "balancer.svc", Done, Done),
        (Some("ours"), &["SIDECAR.svc"], Some("sidecar"), &[], "balancer.svc", Done, Done),
        (Some("ours"), &["sidecar"], Some("sidecar"), &[], "balancer.svc", WrongName, RefusedByPeer),
    ];
    for (ca, allowed, own, wanted, host, at_server, at_client) in rows {
        let (server, client) = (world.server("balancer", ca, allowed), world.client("ours", own, wanted));
        let ends = meet(&server, &client, host).await;
        assert_eq!(ends, (at_server, at_client), "{ca:?} {allowed:?} {own:?} {wanted:?} {host}");
    }
    let (server, client) = (world.server("stranger", None, &[]), world.client("ours", None, &[]));
    assert_eq!(meet(&server, &client, "balancer.svc").await.1, UnknownIssuer);
}

#[tokio::test]
async fn certificates_are_replaced_and_broken_ones_are_not_taken() {
    let world = World::new();
    let dir = world.dir.path();
    let (server, client) = (world.server("balancer", None, &[]), world.client("ours", None, &[]));
    assert!(matches!(server.look(), Looked::Unchanged));
    let (cert, key) = (dir.join("balancer.pem"), dir.join("balancer.key"));
    let (old_cert, old_key) = (std::fs::read(&cert).unwrap(), std::fs::read(&key).unwrap());

    // A certificate without its key, told once; then no file at all, told once.
    std::fs::copy(dir.join("sidecar.pem"), &cert).unwrap();
    assert!(matches!(server.look(), Looked::Failed(_)));
    assert!(matches!(server.look(), Looked::Unchanged));
    assert_eq!(meet(&server, &client, "balancer.svc").await, (HandshakeEnd::Done, HandshakeEnd::Done));
    std::fs::remove_file(&key).unwrap();
    assert!(matches!(server.look(), Looked::Failed(_)));
    assert!(matches!(server.look(), Looked::Unchanged));
    assert_eq!(meet(&server, &client, "balancer.svc").await, (HandshakeEnd::Done, HandshakeEnd::Done));

    // The pair is whole again: its name is the sidecar's.
    std::fs::copy(dir.join("sidecar.key"), &key).unwrap();
    assert!(matches!(server.look(), Looked::Replaced));
    assert_eq!(meet(&server, &client, "sidecar.svc").await, (HandshakeEnd::Done, HandshakeEnd::Done));
    std::fs::write(&cert, old_cert).unwrap();
    std::fs::write(&key, old_key).unwrap();
    assert!(matches!(server.look(), Looked::Replaced));
    assert_eq!(meet(&server, &client, "balancer.svc").await, (HandshakeEnd::Done, HandshakeEnd::Done));

    // Another authority: the client does not believe the balancer any more.
    std::fs::copy(dir.join("theirs-ca.pem"), dir.join("ours-ca.pem")).unwrap();
    assert!(matches!(client.look(), Looked::Replaced));
    assert_eq!(client.generation(), 1);
    assert_eq!(meet(&server, &client, "balancer.svc").await.1, HandshakeEnd::UnknownIssuer);
    // 4000-01-01, as `date` says.
    assert_eq!(world.metrics.expires.get_or_create(&LinkLabels { link: "sync_tls" }).get(), 64_060_588_800);
}

#[tokio::test(start_paused = true)]
async fn a_handshake_that_does_not_go_on_ends() {
    let world = World::new();
    let server = world.server("balancer", None, &[]);
    let (_silent, far) = duplex(64);
    assert_eq!(server.accept(far).await.unwrap_err().end, HandshakeEnd::TimedOut);
    let (mut plain, far) = duplex(1024);
    plain.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    assert_eq!(server.accept(far).await.unwrap_err().end, HandshakeEnd::NotTls);
    let labels = HandshakeLabels { link: "sync_tls", end: HandshakeEnd::NotTls };
    assert_eq!(world.metrics.handshakes.get_or_create(&labels).get(), 1);
}

#[track_caller]
fn check<T: Validate>(config: &T, expect: &str) {
    assert!(config.validate().unwrap_err().to_string().contains(expect), "{expect}");
}

#[test]
fn blocks_that_cannot_mean_what_they_seem_to_are_refused() {
    let dir = Path::new("/etc/fovea");
    let server = server_config(dir, "balancer", Some("ours"), &["a"]);
    assert!(server.validate().is_ok());
    check(&ServerTlsConfig { ca_file: None, ..server.clone() }, "ca_file: is missing");
    check(&ServerTlsConfig { client_auth: ClientAuth::None, ..server.clone() }, "client_auth: required");
    let none = ServerTlsConfig { client_auth: ClientAuth::None, ca_file: None, ..server.clone() };
    check(&none, "allowed_names: is given");
    check(&ServerTlsConfig { allowed_names: vec!["*.svc".to_owned()], ..server.clone() }, "no whole name");
    check(&ServerTlsConfig { handshake_timeout: Duration::ZERO, ..server }, "handshake_timeout: is 0");
    let client = client_config(dir, "ours", Some("sidecar"), &[]);
    assert!(client.validate().is_ok());
    check(&ClientTlsConfig { key_file: None, ..client.clone() }, "key_file: is missing");
    let named = ClientTlsConfig { server_name: Some("a".to_owned()), allowed_names: vec!["b".to_owned()], ..client };
    check(&named, "server_name: is not looked at");
}

#[test]
fn files_that_make_no_tls_are_named() {
    let world = World::new();
    let dir = world.dir.path();
    let error = |config: &ServerTlsConfig| match ServerTls::load("tls", config, ALPN, &world.metrics) {
        Ok(_) => String::new(),
        Err(error) => error.to_string(),
    };
    let fine = server_config(dir, "balancer", Some("ours"), &[]);
    assert_eq!(error(&fine), "");
    let missing = ServerTlsConfig { cert_file: dir.join("none.pem"), ..fine.clone() };
    assert!(error(&missing).starts_with("cert_file: cannot read"));
    let swapped = ServerTlsConfig { cert_file: dir.join("balancer.key"), ..fine.clone() };
    assert!(error(&swapped).contains("holds no certificate"));
    let no_key = ServerTlsConfig { key_file: dir.join("balancer.pem"), ..fine.clone() };
    assert!(error(&no_key).contains("holds no private key"));
    let other = ServerTlsConfig { key_file: dir.join("sidecar.key"), ..fine };
    assert!(error(&other).contains("no pair"));
}

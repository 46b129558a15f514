//! HTTPS to the checked address, with the name's certificate.

use std::sync::Arc;

use fovea_balancer::fetch::Reason;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::support::{Scripted, fetcher_with, ok, origin};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fetch/tls");

/// A server with a certificate for `media.test`, by the authority in `authority.pem`.
async fn secure() -> std::net::SocketAddr {
    let read = |name: &str| std::fs::read(format!("{FOLDER}/{name}")).unwrap();
    let chain = CertificateDer::pem_slice_iter(&read("media.pem")).collect::<Result<_, _>>().unwrap();
    let key = PrivateKeyDer::from_pem_slice(&read("media.key")).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let (listener, inner) = (TcpListener::bind("127.0.0.1:0").await.unwrap(), origin(|_, _| ok(b"")).await);
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            if let Ok(stream) = acceptor.accept(stream).await {
                inner.serve(stream, &|_, _| ok(b"secure")).await;
            }
        }
    });
    address
}

#[tokio::test]
async fn the_certificate_must_be_of_the_urls_name_and_of_a_trusted_authority() {
    let port = secure().await.port();
    let names: &[(&str, &[&[&str]])] = &[("media.test", &[&["127.0.0.1"]]), ("other.test", &[&["127.0.0.1"]])];
    let open = "allow: [127.0.0.1/32], ports: []";
    let trusting = fetcher_with(&format!("{{{open}, ca_file: {FOLDER}/authority.pem}}"), Scripted::new(names));
    let url = format!("https://media.test:{port}/a");
    assert_eq!(&trusting.fetches(&url).await.bytes[..], b"secure");
    trusting.refuses(&format!("https://other.test:{port}/a"), Reason::Tls).await;
    trusting.refuses(&format!("https://127.0.0.1:{port}/a"), Reason::Tls).await;
    fetcher_with(&format!("{{{open}}}"), Scripted::new(names)).refuses(&url, Reason::Tls).await;
}

#[tokio::test]
async fn a_plain_server_is_no_secure_one() {
    let origin = origin(|_, _| ok(b"plain")).await;
    let tested = fetcher_with("{allow: [127.0.0.1/32], ports: [], timeout: 300ms}", Scripted::new(&[]));
    let error = tested.fetcher.fetch(&format!("https://{}/", origin.address)).await.unwrap_err();
    assert!(matches!(error.cause, Reason::Tls | Reason::Timeout), "{error}");
}

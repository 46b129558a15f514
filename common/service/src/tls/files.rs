//! Certificates and keys from files.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, RootCertStore};

use super::certificate;

/// Longest file that is read, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Files that make no TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{field}: cannot read {}", path.display())]
    Read {
        field: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{field}: {} is longer than {FILE_BYTES_MAX} bytes; name a PEM file", path.display())]
    TooLong { field: &'static str, path: PathBuf },
    #[error("{field}: {} holds no certificate; write PEM blocks `BEGIN CERTIFICATE` into it", path.display())]
    NoCertificate { field: &'static str, path: PathBuf },
    #[error("key_file: {} holds no private key; write a PEM block such as `BEGIN PRIVATE KEY` into it", path.display())]
    NoKey { path: PathBuf },
    #[error("ca_file: {} holds a certificate that cannot be a root", path.display())]
    Root {
        path: PathBuf,
        #[source]
        source: rustls::Error,
    },
    #[error("cert_file and key_file make no pair that can be used")]
    Pair(#[source] rustls::Error),
    #[error("ca_file: peers cannot be checked with it")]
    Verifier(#[source] rustls::client::VerifierBuilderError),
    #[error("server_name: `{name}` is neither a DNS name nor an address")]
    ServerName { name: String },
}

/// Which files; the same fields in every block of a config.
#[derive(Clone, Debug)]
pub struct Files {
    pub cert: Option<PathBuf>,
    pub key: Option<PathBuf>,
    pub ca: Option<PathBuf>,
}

/// What the files hold.
pub struct Material {
    pub chain: Vec<CertificateDer<'static>>,
    pub key: Option<PrivateKeyDer<'static>>,
    pub roots: Option<Arc<RootCertStore>>,
    /// End of our own certificate, in seconds since 1970.
    pub not_after: Option<i64>,
}

/// Bytes of all files, and a digest that changes when any of them does.
pub struct Texts {
    cert: Option<Vec<u8>>,
    key: Option<Vec<u8>>,
    ca: Option<Vec<u8>>,
    pub digest: blake3::Hash,
}

impl Files {
    /// Reads all files. Blocking.
    ///
    /// # Errors
    /// The first that cannot be read.
    pub fn read(&self) -> Result<Texts, TlsError> {
        let text = |field, path: &Option<PathBuf>| path.as_deref().map(|path| read(field, path)).transpose();
        let cert = text("cert_file", &self.cert)?;
        let key = text("key_file", &self.key)?;
        let ca = text("ca_file", &self.ca)?;
        let mut hasher = blake3::Hasher::new();
        for text in [&cert, &key, &ca] {
            let text = text.as_deref().unwrap_or_default();
            hasher.update(&(text.len() as u64).to_le_bytes()).update(text);
        }
        Ok(Texts { cert, key, ca, digest: hasher.finalize() })
    }

    /// Certificates and keys of the texts.
    ///
    /// # Errors
    /// The first file that does not hold what it should.
    pub fn parse(&self, texts: &Texts) -> Result<Material, TlsError> {
        let path = |path: &Option<PathBuf>| path.clone().unwrap_or_default();
        let chain = match &texts.cert {
            Some(text) => certificates("cert_file", &path(&self.cert), text)?,
            None => Vec::new(),
        };
        let key = texts.key.as_deref().map(PrivateKeyDer::from_pem_slice).transpose();
        let key = key.map_err(|_| TlsError::NoKey { path: path(&self.key) })?;
        let roots = match &texts.ca {
            Some(text) => Some(Arc::new(roots(&path(&self.ca), text)?)),
            None => None,
        };
        let not_after = chain.first().and_then(|own| certificate::not_after(own));
        Ok(Material { chain, key, roots, not_after })
    }
}

fn read(field: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    let failed = |source| TlsError::Read { field, path: path.to_owned(), source };
    let mut text = Vec::new();
    File::open(path).map_err(failed)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut text).map_err(failed)?;
    match text.len() as u64 > FILE_BYTES_MAX {
        true => Err(TlsError::TooLong { field, path: path.to_owned() }),
        false => Ok(text),
    }
}

fn certificates(field: &'static str, path: &Path, text: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let none = || TlsError::NoCertificate { field, path: path.to_owned() };
    let found = CertificateDer::pem_slice_iter(text).collect::<Result<Vec<_>, _>>().map_err(|_| none())?;
    if found.is_empty() { Err(none()) } else { Ok(found) }
}

fn roots(path: &Path, text: &[u8]) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for root in certificates("ca_file", path, text)? {
        roots.add(root).map_err(|source| TlsError::Root { path: path.to_owned(), source })?;
    }
    Ok(roots)
}

//! A private certificate authority for tests: files as an operator would have them.

use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType,
};

/// An authority and the folder that its files lie in: `NAME-ca.pem`, and for each certificate `NAME.pem` and `NAME.key`.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    name: String,
    dir: PathBuf,
}

impl Authority {
    /// # Errors
    /// When the folder cannot be written.
    pub fn new(dir: &Path, name: &str) -> anyhow::Result<Self> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate()?;
        std::fs::write(dir.join(format!("{name}-ca.pem")), params.self_signed(&key)?.pem())?;
        Ok(Self { issuer: Issuer::new(params, key), name: name.to_owned(), dir: dir.to_owned() })
    }

    /// Certifies `NAME` for addresses, DNS names and `spiffe://` ids, in place of what was certified before.
    ///
    /// # Errors
    /// When a name is none, or the folder cannot be written.
    pub fn certify(&self, name: &str, names: &[&str]) -> anyhow::Result<()> {
        let mut params = CertificateParams::new(Vec::new())?;
        for name in names {
            params.subject_alt_names.push(match name.parse() {
                Ok(address) => SanType::IpAddress(address),
                Err(_) if name.contains("://") => SanType::URI((*name).try_into()?),
                Err(_) => SanType::DnsName((*name).try_into()?),
            });
        }
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        std::fs::write(self.dir.join(format!("{name}.pem")), certificate.pem())?;
        Ok(std::fs::write(self.dir.join(format!("{name}.key")), key.serialize_pem())?)
    }

    /// `ca_file: …` of a config.
    pub fn ca(&self) -> String {
        format!("ca_file: {}", self.dir.join(format!("{}-ca.pem", self.name)).display())
    }

    /// `cert_file: …, key_file: …` of a config.
    pub fn pair(&self, name: &str) -> String {
        let file = |end: &str| self.dir.join(format!("{name}.{end}")).display().to_string();
        format!("cert_file: {}, key_file: {}", file("pem"), file("key"))
    }
}

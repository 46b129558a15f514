//! What configs say of TLS. The same two blocks stand in both programs.

use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use crate::config::{Invalid, Validate, human_duration};

/// Longest list of allowed names.
const NAMES_MAX: usize = 256;

/// Certificates of a port.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerTlsConfig {
    /// PEM: our certificate, then the intermediates up to its root.
    pub cert_file: PathBuf,
    /// PEM: the key of the first of them.
    pub key_file: PathBuf,
    /// PEM: who signs the certificates of peers. With `client_auth: required` alone.
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
    #[serde(default)]
    pub client_auth: ClientAuth,
    /// DNS names and URIs (SPIFFE ids), one of which a peer's certificate must carry, letter by letter. Empty = any certificate of `ca_file`.
    #[serde(default)]
    pub allowed_names: Vec<String>,
    /// From the first byte to the end of the handshake.
    #[serde(default = "handshake_timeout", with = "human_duration")]
    pub handshake_timeout: Duration,
}

fn handshake_timeout() -> Duration {
    Duration::from_secs(5)
}

/// Must peers show a certificate?
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClientAuth {
    #[default]
    None,
    Required,
}

/// Certificates of a link that is dialled.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientTlsConfig {
    /// PEM: who signs the certificates of the port that is dialled.
    pub ca_file: PathBuf,
    /// PEM: our certificate, for ports that ask for one.
    #[serde(default)]
    pub cert_file: Option<PathBuf>,
    /// PEM: its key.
    #[serde(default)]
    pub key_file: Option<PathBuf>,
    /// Name that the port's certificate must be for. None = the host that is dialled.
    #[serde(default)]
    pub server_name: Option<String>,
    /// In place of that name: DNS names and URIs (SPIFFE ids), one of which the certificate must carry, letter by letter.
    #[serde(default)]
    pub allowed_names: Vec<String>,
}

impl Validate for ServerTlsConfig {
    fn validate(&self) -> Result<(), Invalid> {
        let required = self.client_auth == ClientAuth::Required;
        if required && self.ca_file.is_none() {
            let remedy = "name the PEM file of the authority that signs the peers' certificates";
            return Err(Invalid::new("ca_file", "is missing though client_auth is required", remedy));
        }
        if !required && self.ca_file.is_some() {
            let remedy = "write `client_auth: required`, or leave ca_file out";
            return Err(Invalid::new("ca_file", "is given though nobody is asked for a certificate", remedy));
        }
        if !required && !self.allowed_names.is_empty() {
            let remedy = "write `client_auth: required` and a ca_file, or leave allowed_names out";
            return Err(Invalid::new("allowed_names", "is given though nobody is asked for a certificate", remedy));
        }
        if self.handshake_timeout.is_zero() {
            return Err(Invalid::new("handshake_timeout", "is 0", "write a time such as `5s`"));
        }
        names(&self.allowed_names)
    }
}

impl Validate for ClientTlsConfig {
    fn validate(&self) -> Result<(), Invalid> {
        if self.cert_file.is_some() != self.key_file.is_some() {
            let missing = if self.cert_file.is_some() { "key_file" } else { "cert_file" };
            return Err(Invalid::new(missing, "is missing", "give cert_file and key_file together, or neither"));
        }
        if self.server_name.is_some() && !self.allowed_names.is_empty() {
            let remedy = "leave one of them out";
            return Err(Invalid::new("server_name", "is not looked at when allowed_names is given", remedy));
        }
        names(&self.allowed_names)
    }
}

fn names(allowed: &[String]) -> Result<(), Invalid> {
    if allowed.len() > NAMES_MAX {
        return Err(Invalid::new("allowed_names", format!("has more than {NAMES_MAX} names"), "leave some out"));
    }
    match allowed.iter().find(|name| name.trim().is_empty() || name.contains('*')) {
        Some(name) => {
            let remedy = "write whole names such as `balancer.fovea.svc` or `spiffe://fovea/balancer`";
            Err(Invalid::new("allowed_names", format!("has `{name}`, which is no whole name"), remedy))
        }
        None => Ok(()),
    }
}

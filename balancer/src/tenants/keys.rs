//! Keys as they are written and as they are sent.

use std::fs::File;
use std::io::Read;

use fovea_balancer_core::tenants::Digest;
use http::{HeaderMap, HeaderName, header};
use sha2::{Digest as _, Sha256};

use super::error::TenantError;
use crate::config::tenants::{AccessConfig, TenantConfig};

/// Longest file of keys, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Shortest and longest key, in bytes.
const KEY_BYTES: std::ops::RangeInclusive<usize> = 16..=512;
/// Marks a digest among keys.
const DIGEST_MARK: &str = "sha256:";

/// Headers that carry a key; the first that does counts. `authorization` is read as `Bearer KEY`.
pub const KEY_HEADERS: [HeaderName; 3] =
    [header::AUTHORIZATION, HeaderName::from_static("api-key"), HeaderName::from_static("x-api-key")];

/// Why somebody may not ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    NoKey,
    UnknownKey,
}

/// The key that a request carries.
pub(super) fn sent(headers: &HeaderMap) -> Option<&[u8]> {
    KEY_HEADERS.iter().find_map(|name| {
        let value = headers.get(name)?.as_bytes();
        let key = if *name == header::AUTHORIZATION { bearer(value)? } else { value };
        Some(key.trim_ascii()).filter(|key| !key.is_empty())
    })
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
}

pub(super) fn digest(key: &[u8]) -> Digest {
    Digest(Sha256::digest(key).into())
}

/// Digests of a tenant's keys, in the order in which they are written.
pub(super) fn of(tenant: &TenantConfig) -> Result<Vec<Digest>, TenantError> {
    let mut digests: Vec<_> = tenant.keys_sha256.iter().filter_map(|text| Digest::from_hex(text)).collect();
    if let Some(path) = &tenant.keys_file {
        let failed = |source| TenantError::Read { tenant: tenant.name.clone(), path: path.clone(), source };
        let mut text = String::new();
        File::open(path).map_err(failed)?.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(failed)?;
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(TenantError::TooLong { tenant: tenant.name.clone(), path: path.clone(), most: FILE_BYTES_MAX });
        }
        // A key may hold the sign itself: it begins a comment at the start of a word only.
        let comment = |word: &&str| word.starts_with('#');
        let lines = text.lines().map(|line| match line.split_ascii_whitespace().find(comment) {
            Some(word) => line[..word.as_ptr() as usize - line.as_ptr() as usize].trim(),
            None => line.trim(),
        });
        digests.extend(written(tenant, &path.display().to_string(), lines.filter(|line| !line.is_empty()))?);
    }
    if let Some(variable) = &tenant.keys_env {
        let not_set = |_| TenantError::NotSet { tenant: tenant.name.clone(), variable: variable.clone() };
        let text = std::env::var(variable).map_err(not_set)?;
        digests.extend(written(tenant, variable, text.split_ascii_whitespace())?);
    }
    Ok(digests)
}

fn written<'t>(
    tenant: &TenantConfig,
    origin: &str,
    keys: impl Iterator<Item = &'t str>,
) -> Result<Vec<Digest>, TenantError> {
    let (name, origin) = (|| tenant.name.clone(), || origin.to_owned());
    let one = |(number, key): (usize, &str)| {
        let fine = KEY_BYTES.contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic());
        let read = match key.strip_prefix(DIGEST_MARK) {
            Some(hex) => Digest::from_hex(hex),
            None => fine.then(|| digest(key.as_bytes())),
        };
        read.ok_or_else(|| TenantError::BadKey { tenant: name(), origin: origin(), number })
    };
    let digests = (1..).zip(keys).map(one).collect::<Result<Vec<_>, _>>()?;
    match digests.is_empty() {
        true => Err(TenantError::NoKey { tenant: name(), origin: origin() }),
        false => Ok(digests),
    }
}

/// The secret of isolated tenants.
pub(super) fn secret(access: &AccessConfig) -> Result<Vec<u8>, TenantError> {
    let (field, text) = match (&access.isolation_secret_file, &access.isolation_secret_env) {
        (Some(path), _) => {
            let field = "access.isolation_secret_file";
            let mut text = Vec::new();
            let read = File::open(path).and_then(|file| file.take(FILE_BYTES_MAX).read_to_end(&mut text));
            read.map_err(|source| TenantError::Secret { field, source: Some(source) })?;
            (field, text)
        }
        (None, variable) => {
            let text = variable.as_ref().and_then(|variable| std::env::var(variable).ok()).unwrap_or_default();
            ("access.isolation_secret_env", text.into_bytes())
        }
    };
    let secret = text.trim_ascii();
    match secret.len() {
        0..16 => Err(TenantError::Secret { field, source: None }),
        _ => Ok(secret.to_vec()),
    }
}

//! What sets one tenant's blocks and media apart from everybody else's.
//!
//! **Invariant:** salts and identities of two tenants are equal only if their keys are; a client chooses among those of its own tenant,
//! never another's.

use fovea_kv::MediaId;

/// One tenant's key. Equal in every balancer with the same secret.
#[derive(Clone)]
pub struct Isolation {
    key: [u8; 32],
}

impl std::fmt::Debug for Isolation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Isolation(…)")
    }
}

impl Isolation {
    /// `secret` = of all tenants; nobody else may know it, or he could name a tenant's salts.
    pub fn new(secret: &[u8], tenant: &str) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("fovea balancer, isolation of tenants, version 1");
        hasher.update(&(secret.len() as u64).to_le_bytes()).update(secret).update(tenant.as_bytes());
        Self { key: *hasher.finalize().as_bytes() }
    }

    /// The salt in place of the client's own, in hex: of a form that every engine takes.
    pub fn salt(&self, client: &str) -> String {
        self.digest(b"salt", client.as_bytes()).to_hex().to_string()
    }

    /// The identity in place of that of the content.
    pub fn media_id(&self, content: MediaId) -> MediaId {
        MediaId(*self.digest(b"item", &content.0).as_bytes())
    }

    fn digest(&self, of: &[u8; 4], bytes: &[u8]) -> blake3::Hash {
        blake3::Hasher::new_keyed(&self.key).update(of).update(bytes).finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_and_secrets_share_nothing() {
        let all = [("s", "a"), ("s", "b"), ("t", "a"), ("sa", "")].map(|(s, t)| Isolation::new(s.as_bytes(), t));
        for (at, one) in all.iter().enumerate() {
            for other in &all[..at] {
                assert_ne!(one.salt(""), other.salt(""));
                assert_ne!(one.media_id(MediaId([1; 32])), other.media_id(MediaId([1; 32])));
            }
        }
    }

    #[test]
    fn within_a_tenant_the_client_s_salt_counts() {
        let one = Isolation::new(b"s", "a");
        assert_eq!(one.salt("x"), Isolation::new(b"s", "a").salt("x"));
        assert_ne!(one.salt("x"), one.salt(""));
        assert!(one.salt("x").len() == 64 && one.salt("x").bytes().all(|c| c.is_ascii_hexdigit()));
        assert_ne!(one.media_id(MediaId([1; 32])), one.media_id(MediaId([2; 32])));
    }
}

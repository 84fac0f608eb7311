//! TLS for tests: the certificate of the folder `tls`, which no other program trusts, and authorities that
//! make certificates while a test runs.

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tls").join(name)
}

/// Returns the file with the authority that a client has to trust, for example in `SSL_CERT_FILE`.
#[must_use]
pub fn authority() -> PathBuf {
    file("authority.pem")
}

/// Returns the files with the certificate for `localhost`, `127.0.0.1` and `0.0.0.0`, and with its key.
#[must_use]
pub fn server() -> (PathBuf, PathBuf) {
    (file("server.pem"), file("server.key"))
}

/// Returns what accepts TLS connections to `localhost`, `127.0.0.1` and `0.0.0.0`.
pub(crate) fn acceptor() -> TlsAcceptor {
    let certificate = CertificateDer::from_pem_file(file("server.pem")).expect("the certificate");
    let key = PrivateKeyDer::from_pem_file(file("server.key")).expect("its key");
    let provider = Arc::new(aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.expect("the versions of TLS").with_no_client_auth();
    let config = config.with_single_cert(vec![certificate], key).expect("a key for the certificate");
    TlsAcceptor::from(Arc::new(config))
}

/// A certificate and its key, in PEM form.
#[derive(Debug, Clone)]
pub struct PemPair {
    /// The certificate.
    pub cert: String,
    pub key: String,
}

impl PemPair {
    /// Writes the two files `NAME.crt` and `NAME.key` into a directory. Returns their paths.
    ///
    /// Each file is renamed into place, so that a reader sees it whole.
    ///
    /// # Panics
    /// If the directory cannot be written.
    #[must_use]
    pub fn write(&self, dir: &Path, name: &str) -> (PathBuf, PathBuf) {
        let put = |end: &str, text: &str| {
            let (part, path) = (dir.join(format!("{name}.{end}.part")), dir.join(format!("{name}.{end}")));
            fs::write(&part, text).expect("write");
            fs::rename(&part, &path).expect("rename");
            path
        };
        (put("crt", &self.cert), put("key", &self.key))
    }
}

/// A certificate authority that exists while a test runs.
#[derive(Debug)]
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    /// Makes an authority with this name.
    ///
    /// # Panics
    /// Never, as long as the system has random bytes.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().expect("key")).expect("signed"))
    }

    /// Returns the certificate of the authority, in PEM form.
    #[must_use]
    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// Makes a certificate for a server with these names and addresses, valid until the end of a year.
    ///
    /// # Panics
    /// If a name is not valid.
    #[must_use]
    pub fn server(&self, names: &[&str], until_year: i32) -> PemPair {
        self.sign(names, ExtendedKeyUsagePurpose::ServerAuth, until_year)
    }

    /// Makes a certificate for a client.
    ///
    /// # Panics
    /// As [`Authority::server`].
    #[must_use]
    pub fn client(&self, name: &str) -> PemPair {
        self.sign(&[name], ExtendedKeyUsagePurpose::ClientAuth, 4000)
    }

    fn sign(&self, names: &[&str], usage: ExtendedKeyUsagePurpose, until_year: i32) -> PemPair {
        let names: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
        let mut params = CertificateParams::new(names).expect("names");
        params.extended_key_usages = vec![usage];
        params.not_before = rcgen::date_time_ymd(2001, 1, 1);
        params.not_after = rcgen::date_time_ymd(until_year, 12, 31);
        let key = KeyPair::generate().expect("key");
        let cert = params.signed_by(&key, &self.0).expect("signed");
        PemPair { cert: cert.pem(), key: key.serialize_pem() }
    }
}

//! The settings file and the tokens file of a server, and the `Authorization` header.

use crate::{plant, scratch};
use fletch_server::{
    config::{self, Action, Environment},
    fuzzing,
};

pub fn seeds() -> Vec<Vec<u8>> {
    let whole = r#"
        listen = "127.0.0.1:7380"
        [cache]
        dir = "/var/cache/fletch"
        size = "10GiB"
        policy = "fletch"
        [memory]
        max = "256MiB"
        [limits]
        connections = 100
        idle_timeout = "30s"
        [local]
        dirs = ["/tmp"]
        [[origin]]
        prefix = "s3://bucket/a"
        region = "us-east-1"
        domains = ["vision"]
    "#;
    vec![
        whole.as_bytes().to_vec(),
        b"[io]\ntimeout = \"5s\"\n".to_vec(),
        b"[limits]\nrequests = 0\n".to_vec(),
    ]
}

/// Reads a settings file twice: the settings, or the faults, are the same.
pub fn run(input: &[u8]) -> bool {
    let path = scratch::written("settings.toml", input);
    let state = scratch::path("state");
    let read = || {
        let args = [
            "fletch-server".to_owned(),
            format!("--config={}", path.display()),
            format!("--state-dir={}", state.display()),
            "--config-check".to_owned(),
        ];
        let environment = Environment { home: Some("/home/fletch".into()), ..Environment::default() };
        match config::read(args, &environment) {
            Ok(Action::Check(config)) => Ok(config.show()),
            Ok(_) => Err("another action".to_owned()),
            Err(e) => Err(e.to_string()),
        }
    };
    let settings = read();
    assert_eq!(settings, read(), "the same file gives other settings");
    plant::bug(settings.as_ref().is_err_and(|e| e.matches("settings.toml:").count() > 3));
    settings.is_ok()
}

/// The tenant of the seeds' token.
const TENANT: &str = "team-vision-research";

pub fn token_seeds() -> Vec<Vec<u8>> {
    let hash = fletch_core::Hash::of(b"secret");
    let two = format!(
        "[[token]]\nhash = \"{hash}\"\ntenant = \"{TENANT}\"\nrole = \"reader\"\n[[token]]\nhash = \"{}\"\n\
         tenant = \"u\"\ndomain = \"d\"\nnote = \"n\"\n\
         [[tenant]]\nname = \"{TENANT}\"\nresident = \"2TiB\"\n",
        fletch_core::Hash::of(b"other")
    );
    let one = format!("[[token]]\nhash = \"{hash}\"\ntenant = \"{TENANT}\"\n");
    vec![format!("Bearer secret\n{two}").into_bytes(), format!("Bearer secret\n{one}").into_bytes()]
}

/// The first line is the header, the rest is the file.
///
/// A header has a principal only if the file has the hash of its token.
pub fn run_tokens(input: &[u8]) -> bool {
    let at = input.iter().position(|b| *b == b'\n').unwrap_or(input.len());
    let (header, file) = (&input[..at], input.get(at + 1..).unwrap_or_default());
    let path = scratch::written("tokens.toml", file);
    let Ok(principal) = fuzzing::principal(&path, header) else { return false };
    if let Some(tenant) = principal {
        let text = String::from_utf8_lossy(file);
        let known = header.rsplit(|b| *b == b' ').next().map(fletch_core::Hash::of);
        assert!(known.is_some_and(|h| text.to_lowercase().contains(&h.to_string())), "{tenant} has no token");
        plant::bug(tenant != TENANT);
    }
    true
}

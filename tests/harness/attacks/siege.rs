//! A server with two tenants, and what a victim and probes notice while it is attacked.

use super::{Attack, Link, Pace, Stream, Target};
use crate::{
    bins::{command, run, stdout},
    fixture::{Site, index},
    watch::{peak_rss, rss},
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::{
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// The part of a core that all attackers have together.
const ATTACKERS: f64 = 0.2;
/// The longest time of an answer to a probe.
pub const PROBE_MAX: Duration = Duration::from_secs(1);
/// How often each probe asks.
const PROBE_INTERVAL: Duration = Duration::from_millis(100);
/// After so many requests the victim opens a new connection.
const VICTIM_REQUESTS: usize = 50;
/// The longest time of a reply to the victim.
const VICTIM_TIMEOUT: Duration = Duration::from_secs(10);
/// The bytes of each of the victim's files.
const FILE_BYTES: usize = 256 << 10;
const FILES: usize = 16;
const LARGE: &str = "large.bin";

/// A server with the tenants `victim` and `attacker`. Each has one dataset.
#[derive(Debug)]
pub struct Fortress {
    /// The server.
    pub site: Site,
    home: TempDir,
    root: String,
    victim: String,
    attacker: String,
}

/// What was noticed.
#[derive(Debug, Default)]
pub struct Report {
    /// The attacks, each with the connections that it opened.
    pub attacks: Vec<(&'static str, u64)>,
    /// The longest answers to `/livez` over TCP and over the socket. A failed probe counts as its timeout.
    pub livez: [Duration; 2],
    /// How many probes were sent, and what became of those that failed.
    pub probes: usize,
    /// The probes that failed.
    pub probe_faults: Vec<String>,
    /// The victim's replies that were no 200, and its failed connections.
    pub refusals: Vec<String>,
    /// The victim's bytes a second before and during the attack.
    pub rates: [f64; 2],
    /// The server's resident bytes before the attack, and their peak.
    pub rss: [u64; 2],
    /// The part of a core that the attackers used.
    pub attackers: f64,
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mib = |n: u64| n >> 20;
        let attacks: Vec<String> = self.attacks.iter().map(|(name, n)| format!("{name} ({n})")).collect();
        write!(
            f,
            "{}: /livez at most {:?} over TCP and {:?} over the socket ({} probes); the victim read {:.1} \
             MB/s before and {:.1} MB/s under attack ({:.2}), refused {}; the server had {} MiB before and \
             {} MiB at most; attackers used {:.2} of a core",
            attacks.join(", "),
            self.livez[0],
            self.livez[1],
            self.probes,
            self.rates[0] / 1e6,
            self.rates[1] / 1e6,
            self.rates[1] / self.rates[0],
            self.refusals.len(),
            mib(self.rss[0]),
            mib(self.rss[1]),
            self.attackers
        )
    }
}

fn token(home: &Path, file: &Path, tenant: &str, role: &str) -> String {
    let mut c = command("fletch-server");
    c.args(["token", "new", "--tenant", tenant, "--role", role, "--append"]).arg(file);
    let token = stdout(&run(&mut c));
    fs::write(home.join(format!("{tenant}-{role}.token")), &token).expect("token file");
    token
}

impl Fortress {
    /// Starts a server with `--memory 64MiB` and further flags.
    #[must_use]
    pub fn start(more: &[&str]) -> Self {
        let home = TempDir::with_prefix("fletch-attacks-").expect("home");
        let tokens = home.path().join("tokens.toml");
        let data = home.path().join("data");
        fs::create_dir(&data).expect("mkdir");
        for i in 0..FILES {
            let byte = u8::try_from(i + 1).expect("few");
            fs::write(data.join(format!("f{i}.bin")), vec![byte; FILE_BYTES]).expect("write");
        }
        let large: Vec<u8> =
            (0..(12u32 << 20)).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        fs::write(data.join(LARGE), large).expect("write");
        let tables = home.path().join("tables");
        fs::create_dir(&tables).expect("mkdir");
        let root = index(&data, &tables, &[]);
        let dirs = format!("{}=*:{}=*", data.display(), tables.display());
        let [victim, attacker] =
            ["victim", "attacker"].map(|tenant| token(home.path(), &tokens, tenant, "reader"));
        let owners = ["victim", "attacker"].map(|tenant| {
            token(home.path(), &tokens, tenant, "user");
            home.path().join(format!("{tenant}-user.token"))
        });
        let tokens = tokens.display().to_string();
        let flags =
            ["--memory", "64MiB", "--tables-memory", "16MiB", "--cache-size", "0", "--auth-tokens", &tokens];
        let site = Site::start(&[&flags[..], &["--local-dirs", &dirs], more].concat());
        for owner in owners {
            let mut c = command("fletch");
            c.arg("register").arg("d").arg(&data).arg("--tables").arg(&tables);
            run(c.args(["--server", &site.url]).arg("--token-file").arg(owner));
        }
        Fortress { site, home, root, victim, attacker }
    }

    fn target(&self, token: Option<&str>) -> Target {
        let addr: SocketAddr = self.site.url.trim_start_matches("http://").parse().expect("address");
        Target {
            addr,
            socket: self.site.socket(),
            token: token.map(str::to_owned),
            root: self.root.clone(),
            large: LARGE.to_owned(),
        }
    }

    /// Returns the server as an attacker with the token of another tenant's reader sees it.
    #[must_use]
    pub fn as_tenant(&self) -> Target {
        self.target(Some(&self.attacker))
    }

    /// Returns the server as an attacker without a token sees it.
    #[must_use]
    pub fn as_stranger(&self) -> Target {
        self.target(None)
    }

    /// Returns the server as the victim sees it.
    #[must_use]
    pub fn as_victim(&self) -> Target {
        self.target(Some(&self.victim))
    }

    /// Returns a directory for files of the test.
    #[must_use]
    pub fn home(&self) -> PathBuf {
        self.home.path().to_owned()
    }

    /// Returns the value of a metric's line, which the token of an administrator reads.
    #[must_use]
    pub fn metrics(&self) -> String {
        let tokens = self.home.path().join("tokens.toml");
        let admin = token(self.home.path(), &tokens, "operator", "admin");
        let target = self.target(Some(&admin));
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            // The server reads the changed file within seconds.
            let page = Stream::tcp(target.addr, PROBE_MAX)
                .and_then(|s| Link::new(s, VICTIM_TIMEOUT))
                .and_then(|mut link| link.ask((target.head("GET", "/metrics") + "\r\n").as_bytes()));
            if let Ok(page) = &page
                && page.status == 200
            {
                return String::from_utf8_lossy(&page.body).into_owned();
            }
            assert!(Instant::now() < end, "no metrics: {page:?}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

fn probe(target: &Target, unix: bool) -> io::Result<Duration> {
    let began = Instant::now();
    let stream = if unix { Stream::unix(&target.socket) } else { Stream::tcp(target.addr, PROBE_MAX) };
    let reply = Link::new(stream?, PROBE_MAX)?.ask(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")?;
    if reply.status == 200 { Ok(began.elapsed()) } else { Err(io::Error::other(reply.head)) }
}

/// Reads files as the victim until `done`. Returns the bytes and the refusals.
fn read_as_victim(target: &Target, done: &AtomicBool) -> (u64, Vec<String>) {
    let (mut bytes, mut refusals) = (0, Vec::new());
    while !done.load(Relaxed) {
        let link = Stream::tcp(target.addr, VICTIM_TIMEOUT).and_then(|s| Link::new(s, VICTIM_TIMEOUT));
        let mut link = match link {
            Ok(link) => link,
            Err(e) => {
                refusals.push(format!("connect: {e}"));
                continue;
            }
        };
        for i in 0..VICTIM_REQUESTS {
            if done.load(Relaxed) {
                break;
            }
            let path = format!("/v1/versions/{}/files/f{}.bin", target.root, i % FILES);
            let head = target.head("GET", &path) + "fletch-job: victim\r\n\r\n";
            match link.ask(head.as_bytes()) {
                Ok(reply) if reply.status == 200 => {
                    let byte = u8::try_from(i % FILES + 1).expect("few");
                    assert!(reply.body.iter().all(|b| *b == byte), "wrong bytes of {path}");
                    bytes += reply.body.len() as u64;
                }
                Ok(reply) => {
                    refusals.push(format!("{} {}", reply.status, String::from_utf8_lossy(&reply.body)));
                    break;
                }
                Err(e) => {
                    refusals.push(format!("request {i}: {e}"));
                    break;
                }
            }
        }
    }
    (bytes, refusals)
}

/// Lets the victim read for `time`. Returns its bytes a second and the refusals.
fn victim_for(target: &Target, time: Duration) -> (f64, Vec<String>) {
    let done = AtomicBool::new(false);
    let began = Instant::now();
    let (bytes, refusals) = std::thread::scope(|s| {
        let reading = s.spawn(|| read_as_victim(target, &done));
        std::thread::sleep(time);
        done.store(true, Relaxed);
        reading.join().expect("the victim")
    });
    (bytes as f64 / began.elapsed().as_secs_f64(), refusals)
}

/// Raises the number of files that this process may open, for the connections of the attackers.
fn open_many_files() {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("the limit of open files");
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard).expect("a higher limit of open files");
    }
}

/// Attacks a server for `time`, while a victim reads and probes ask.
#[must_use]
pub fn besiege(of: &Fortress, attacks: Vec<(Target, Box<dyn Attack>)>, time: Duration) -> Report {
    open_many_files();
    let victim = of.as_victim();
    let calm = victim_for(&victim, (time / 4).max(Duration::from_secs(1)));
    let pid = of.site.pid();
    let mut report =
        Report { refusals: calm.1, rates: [calm.0, 0.0], rss: [rss(pid), 0], ..Report::default() };
    let done = AtomicBool::new(false);
    let probing = |unix: bool| {
        let (mut longest, mut faults, mut probes) = (Duration::ZERO, Vec::new(), 0);
        while !done.load(Relaxed) {
            probes += 1;
            match probe(&victim, unix) {
                Ok(took) => longest = longest.max(took),
                Err(e) => {
                    longest = longest.max(PROBE_MAX);
                    faults.push(format!("{}: {e}", if unix { "socket" } else { "TCP" }));
                }
            }
            std::thread::sleep(PROBE_INTERVAL);
        }
        (longest, faults, probes)
    };
    std::thread::scope(|s| {
        let attacking = s.spawn(|| {
            let (pace, mut attacks) = (Pace::new(ATTACKERS), attacks);
            while !done.load(Relaxed) {
                for (target, attack) in &mut attacks {
                    attack.step(target);
                }
                pace.keep();
            }
            let opened: Vec<_> = attacks.iter().map(|(_, a)| (a.name(), a.opened())).collect();
            (pace.share(), opened)
        });
        let probes = [s.spawn(|| probing(false)), s.spawn(|| probing(true))];
        // The attackers get a head start: what counts is how the server does when they are in place.
        std::thread::sleep(time / 2);
        let under = victim_for(&victim, time);
        report.rates[1] = under.0;
        report.refusals.extend(under.1);
        done.store(true, Relaxed);
        for (i, probe) in probes.into_iter().enumerate() {
            let (longest, faults, probes) = probe.join().expect("probes");
            report.livez[i] = longest;
            report.probe_faults.extend(faults);
            report.probes += probes;
        }
        (report.attackers, report.attacks) = attacking.join().expect("attackers");
    });
    report.rss[1] = peak_rss(pid);
    report
}

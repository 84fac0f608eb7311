//! Starts and stops the server. Owns every task.
//!
//! ```text
//! start:  raise the limit of open files → bind TCP (for its ports) → lock and read state
//!         → open the disk tier → join the cluster → bind the unix socket → phase Ready → accept connections
//! stop:   phase Draining (readyz returns 503) → leave the cluster's view, beside all that follows
//!         → stop accepting, remove the socket file
//!         → let each connection finish its reply, for at most `limits.grace`
//!         → cut the rest → close the disk tier → exit
//! ```
//! A stop does not wait for running fetches, because they only fill a cache (I5), nor for registrations,
//! which were fsynced before their reply. It takes at most `limits.grace` and 2 s, whatever origins, disks
//! and clients do.
//!
//! Its folder has what every other room may use, too: `config` reads the settings, `limits` has every bound,
//! `telemetry` writes the log and watches reads, `tls` keeps the certificate, `request_metrics` counts
//! requests, `idle` knows when nobody uses the server. `server` holds the parts that all requests share.

mod accept;
pub mod config;
mod connection;
mod descriptors;
mod disk;
mod handshake;
mod hit_thread;
pub(crate) mod idle;
pub(crate) mod limits;
mod listen;
mod local_stream;
mod probe_lane;
pub(crate) mod request_metrics;
pub(crate) mod server;
mod stream;
pub mod telemetry;
pub(crate) mod tls;

pub use crate::app::server::StartError;
use crate::{
    admin::{dashboard::SAMPLE_EVERY, overview},
    app::{
        config::Config,
        idle::IdleClock,
        limits::Limits,
        server::{Phase, Server},
    },
    http, s3,
    tenancy::connections::Refusal,
};
use axum::{Router, response::Response};
use fletch_store::maintenance::{self, close};
use listen::{BoundTcp, Socket};
use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::{net::TcpListener, task::JoinHandle};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// How often the server looks for drafts of which it learned more.
const COUNT_DRAFTS_INTERVAL: Duration = Duration::from_secs(2);
/// How often the server looks for failing origins that nobody asks.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// How often the server checks whether the tokens file or the files of TLS changed.
const RELOAD_INTERVAL: Duration = Duration::from_secs(1);
/// How often the server forgets idle jobs.
const EXPIRE_JOBS_INTERVAL: Duration = Duration::from_secs(60);
/// How often the server expires leases.
const EXPIRE_LEASES_INTERVAL: Duration = Duration::from_millis(250);
/// How often a drained server gives jobs away that it still has.
const MOVES_INTERVAL: Duration = Duration::from_secs(1);
/// How often the server checks whether it is idle.
const IDLE_INTERVAL: Duration = Duration::from_millis(500);
/// How often the server checks whether a decision about the disk is due.
const DECIDE_INTERVAL: Duration = Duration::from_secs(1);
/// How long the server waits for connections that it cut.
const ABORT_TIMEOUT: Duration = Duration::from_millis(500);

/// A running server.
pub struct Running {
    /// The address of its TCP listener, if it has one.
    pub addr: Option<SocketAddr>,
    /// Whether that listener speaks TLS.
    pub tls: bool,
    /// The address of its S3 door, if that is on.
    pub s3: Option<SocketAddr>,
    /// The path of its unix socket, if it has one.
    pub socket: Option<PathBuf>,
    /// Cancel it to stop the server.
    pub stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Running {
    /// Returns the server's URL: `http(s)://host:port`, or `unix:PATH` if it listens on its socket only.
    #[must_use]
    pub fn url(&self) -> String {
        url(self.addr, self.tls, self.socket.as_deref())
    }

    /// Stops the server and waits until it has stopped.
    pub async fn shutdown(self) {
        self.stop.cancel();
        self.stopped().await;
    }

    /// Waits until the server has stopped.
    pub async fn stopped(self) {
        if let Err(e) = self.task.await {
            tracing::error!(error = %e, "the server's main task panicked");
        }
    }
}

/// Returns the URL by which clients on this machine reach a server that listens on one of these.
fn url(addr: Option<SocketAddr>, tls: bool, socket: Option<&Path>) -> String {
    match (addr, socket) {
        (Some(addr), _) if tls => format!("https://{addr}"),
        (Some(addr), _) => format!("http://{addr}"),
        (None, socket) => format!("unix:{}", socket.unwrap_or(Path::new("")).display()),
    }
}

/// The values that the tasks share. Connections of the S3 door have the same ones, with other answers.
struct App {
    server: Arc<Server>,
    router: Router,
    /// Returns the answer to a connection over a limit.
    refused: fn(Refusal, &Limits) -> Response,
    connections: TaskTracker,
    /// Cancelled to end connections after their current reply.
    drain: CancellationToken,
    /// Cancelled to cut connections now.
    abort: CancellationToken,
}

impl App {
    /// Returns the same values for connections of the S3 door.
    fn for_s3(&self) -> App {
        App {
            server: Arc::clone(&self.server),
            router: s3::router(Arc::clone(&self.server)),
            refused: s3::refused,
            connections: self.connections.clone(),
            drain: self.drain.clone(),
            abort: self.abort.clone(),
        }
    }
}

/// Starts a server, which takes requests when this returns.
///
/// # Errors
/// [`StartError`], which says what to do.
pub async fn start(mut config: Config) -> Result<Running, StartError> {
    config.limits = descriptors::fit(config.limits)?;
    let tasks = TaskTracker::new();
    let tcp = config.listen.map(BoundTcp::bind).transpose()?;
    let s3 = config.s3.as_ref().map(|s3| BoundTcp::bind(s3.listen)).transpose()?;
    let (addr, tls) = (tcp.as_ref().map(|tcp| tcp.addr), config.tls.is_some());
    let own_url = url(addr, tls, config.socket.as_deref());
    let s3_addr = s3.as_ref().map(|s3| s3.addr);
    let server = Server::open(&config, own_url, s3_addr, tasks.clone())?;
    disk::open_first(&server).await.map_err(StartError::Disk)?;
    server.cluster.join_first(server.cluster_weight()).await?;
    server.catalog.load_first().await;
    server.groups.load_first(&server.registry).await;
    // After the state directory is locked, so that a second server does not get this far.
    let socket = config.socket.clone().map(Socket::bind).transpose()?;
    let app = Arc::new(App {
        router: http::router(Arc::clone(&server)),
        refused: http::refused,
        connections: TaskTracker::new(),
        drain: CancellationToken::new(),
        abort: CancellationToken::new(),
        server,
    });
    let stop = CancellationToken::new();
    let path = socket.as_ref().map(|s| s.path().to_owned());
    app.server.enter(Phase::Ready);
    let doors = Doors { tcp: listener(tcp)?, s3: listener(s3)?, socket };
    let task = tasks.spawn(run(app, doors, config.idle, stop.clone()));
    Ok(Running { addr, tls, s3: s3_addr, socket: path, stop, task })
}

/// What the server listens on.
struct Doors {
    tcp: Option<TcpListener>,
    s3: Option<TcpListener>,
    socket: Option<Socket>,
}

fn listener(bound: Option<BoundTcp>) -> Result<Option<TcpListener>, StartError> {
    bound.map(BoundTcp::listener).transpose()
}

/// Counts what is known of the drafts in use, and seals those that are known whole, until `stop`.
async fn count_drafts(server: Arc<Server>, stop: CancellationToken) {
    let ticks = async {
        loop {
            tokio::time::sleep(COUNT_DRAFTS_INTERVAL).await;
            server.seals.tick().await;
        }
    };
    tokio::select! {
        () = ticks => {}
        () = stop.cancelled() => {}
    }
}

async fn run(
    app: Arc<App>,
    Doors { tcp, s3, socket }: Doors,
    idle_max: Option<Duration>,
    stop: CancellationToken,
) {
    let accepting = TaskTracker::new();
    if let Some(tcp) = tcp {
        accepting.spawn(Arc::clone(&app).accept_tcp(tcp));
    }
    if let Some(s3) = s3 {
        accepting.spawn(Arc::new(app.for_s3()).accept_tcp(s3));
    }
    if let Some(unix) = socket.as_ref().and_then(Socket::listener) {
        accepting.spawn(Arc::clone(&app).accept_unix(unix));
    }
    accepting.spawn(count_drafts(Arc::clone(&app.server), app.drain.clone()));
    let (leave_cluster, cluster_tasks) = (CancellationToken::new(), TaskTracker::new());
    let (server, token) = (Arc::clone(&app.server), leave_cluster.clone());
    cluster_tasks.spawn(async move {
        tokio::join!(
            server.cluster.run(token.clone()),
            server.catalog.run(token.clone()),
            server.groups.run(&server.registry, token.clone()),
            server.follow_ring(token)
        );
    });
    let (stop_maintenance, maintenance_tasks) = (CancellationToken::new(), TaskTracker::new());
    let disk = app.server.store.disk().map(Arc::clone);
    if let Some(disk) = disk.clone() {
        let server = Arc::clone(&app.server);
        maintenance_tasks.spawn(maintenance::run(server, disk, stop_maintenance.clone()));
    }
    let mut expire = tokio::time::interval(EXPIRE_JOBS_INTERVAL);
    let mut reload = tokio::time::interval(RELOAD_INTERVAL);
    let mut probe = tokio::time::interval(PROBE_INTERVAL);
    let mut leases = tokio::time::interval(EXPIRE_LEASES_INTERVAL);
    leases.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut decide = tokio::time::interval(DECIDE_INTERVAL);
    decide.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut moves = tokio::time::interval(MOVES_INTERVAL);
    moves.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut sample = tokio::time::interval(SAMPLE_EVERY);
    sample.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut idle, mut idle_clock) = (tokio::time::interval(IDLE_INTERVAL), IdleClock::default());
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            _ = idle.tick(), if idle_max.is_some() => {
                let idle_for = idle_clock.observe(app.server.activity(), app.server.now_ns());
                if idle_max.is_some_and(|max| idle_for >= max) {
                    tracing::info!(?idle_for, "stopping, because nobody uses this server (setting `idle`)");
                    break;
                }
            }
            _ = expire.tick() => {
                app.server.expire_jobs();
                let server = Arc::clone(&app.server);
                accepting.spawn_blocking(move || overview::write_savings(&server));
            }
            _ = probe.tick() => app.server.versions.probe_failing(),
            _ = decide.tick() => {
                let server = Arc::clone(&app.server);
                accepting.spawn_blocking(move || {
                    server.allocate_if_due();
                    overview::remeasure(&server);
                });
            }
            _ = sample.tick() => {
                let server = Arc::clone(&app.server);
                accepting.spawn_blocking(move || overview::sample(&server));
            }
            _ = leases.tick() => {
                app.server.registry.tick(app.server.now_ns());
                app.server.reclaims.tick(|id| app.server.groups.lacks_ledgers(id));
            }
            _ = moves.tick() => {
                let server = Arc::clone(&app.server);
                app.server.registry.context.tasks.spawn(async move { http::give_drained(&server).await });
            }
            _ = reload.tick() => {
                let server = Arc::clone(&app.server);
                accepting.spawn_blocking(move || server.versions.learned().write_log());
                let server = Arc::clone(&app.server);
                // Do not wait: the files may lie on a disk that does not reply.
                accepting.spawn_blocking(move || server.reload_files());
            }
        }
    }
    tracing::info!("stopping: no new connections; running replies are finished");
    app.server.enter(Phase::Draining);
    leave_cluster.cancel();
    app.server.warmups.stop();
    app.server.seals.stop();
    app.server.listings.stop();
    app.drain.cancel();
    accepting.close();
    accepting.wait().await;
    drop(socket);
    app.connections.close();
    if tokio::time::timeout(app.server.limits.grace, app.connections.wait()).await.is_err() {
        tracing::warn!(
            connections = app.connections.len(),
            "replies took longer than limits.grace; their connections are cut"
        );
        app.abort.cancel();
        if tokio::time::timeout(ABORT_TIMEOUT, app.connections.wait()).await.is_err() {
            tracing::warn!("some connections did not end after they were cut");
        }
    }
    cluster_tasks.close();
    if tokio::time::timeout(ABORT_TIMEOUT, cluster_tasks.wait()).await.is_err() {
        tracing::warn!("the server did not leave its cluster in time");
    }
    let server = Arc::clone(&app.server);
    let last_writes = tokio::task::spawn_blocking(move || {
        server.versions.learned().write_log();
        overview::write_savings(&server);
        server.registry.end_traces();
    });
    if tokio::time::timeout(ABORT_TIMEOUT, last_writes).await.is_err() {
        tracing::warn!("the last records of some logs and traces were not written");
    }
    stop_maintenance.cancel();
    maintenance_tasks.close();
    maintenance_tasks.wait().await;
    if let Some(disk) = disk {
        close(disk).await;
    }
    tracing::info!("stopped");
}

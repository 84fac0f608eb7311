//! The parts of a running server, which every request can use.

use crate::{
    accounting::{Accounts, LiveJobs},
    auth::{Auth, TokensError},
    config::{CacheConfig, Config},
    connections::{Connections, RequestMemory, TableLimits},
    epochs::JobContext,
    jobs::Registry,
    limits::{CACHE_MIN, Limits, PROBES_MAX, SLABS_MAX},
    prefetch::{PrefetchContext, PrefetchPool},
    read_ahead::ReadAhead,
    request_metrics::RequestMetrics,
    state::{Registrations, StateDir, StateError},
    sweep::{Recorder, SweepContext},
    versions::{ATTEMPTS, Allowlist, Versions},
    warmups::{WarmupContext, Warmups},
};
use fletch_api::{Cluster, Member};
use fletch_core::Tenant;
use fletch_origin::{OriginError, OriginLimits, Origins};
use fletch_settings::{Amount, ByteSize};
use fletch_store::{
    DatasetId, DiskTier, Shares, Store, StoreLimits, TenantQuota,
    disk::{DiskConfig, DiskError, FsSpace, MountMemory},
};
use std::{
    collections::HashMap,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::sync::{Semaphore, watch};
use tokio_util::task::TaskTracker;

/// The directory of the state directory that remembers where cache directories lie.
const CACHE_RECORDS: &str = "caches";

/// The phases of a server's life, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// The server loads its state.
    Starting = 0,
    /// The server takes requests.
    Ready = 1,
    /// The server stops.
    Draining = 2,
}

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The state directory cannot be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// The tokens file cannot be used.
    #[error(transparent)]
    Tokens(#[from] TokensError),
    /// The configured origins are not valid.
    #[error("{0}")]
    Origins(OriginError),
    /// Another process uses the cache directory.
    #[error("cache directory: {0}")]
    Disk(DiskError),
    /// An operation of the system failed.
    #[error("cannot {what}: {error}; {hint}")]
    Io {
        /// The operation.
        what: String,
        /// The system's error.
        error: std::io::Error,
        /// What to do.
        hint: &'static str,
    },
    /// Another process listens on the socket.
    #[error("another server listens on {0}; stop it, or give another path with --socket")]
    SocketInUse(PathBuf),
}

/// The parts of a running server.
pub struct Server {
    /// The limits.
    pub limits: Limits,
    /// Authentication.
    pub auth: Auth,
    /// The settings of the disk tier.
    pub cache: CacheConfig,
    /// Notifies when access to a version may have ended, or the server stops.
    pub access_changes: watch::Sender<()>,
    /// The store of chunks, in memory and on disk.
    pub store: Arc<Store>,
    /// The datasets' shares of the disk.
    pub shares: Arc<Shares>,
    /// The warm-ups.
    pub warmups: Arc<Warmups>,
    /// The open versions.
    pub versions: Arc<Versions>,
    /// The registered datasets.
    pub registrations: Arc<Registrations>,
    /// The declared jobs and their epochs.
    pub registry: Registry,
    /// The live jobs, declared or not.
    pub live_jobs: LiveJobs,
    /// The accounts of delivered bytes.
    pub accounts: Accounts,
    /// The metrics of requests.
    pub requests: RequestMetrics,
    /// Permits for requests for bytes.
    pub read_permits: Arc<Semaphore>,
    /// Memory for samples that are read ahead of being sent.
    pub read_ahead: Arc<ReadAhead>,
    /// The tasks that outlive a request.
    pub tasks: TaskTracker,
    /// The open connections.
    pub connections: Arc<Connections>,
    /// The memory for heads and bodies of requests.
    pub request_memory: Arc<RequestMemory>,
    /// The address of the TCP listener.
    pub addr: SocketAddr,
    phase: AtomicU8,
    started: Instant,
    state: StateDir,
}

impl Server {
    /// Loads the state and creates all parts. The disk tier is opened later.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn open(config: &Config, addr: SocketAddr, tasks: TaskTracker) -> Result<Arc<Self>, StartError> {
        let limits = config.limits;
        let auth = Auth::open(config.auth_tokens.as_deref())?;
        let state = StateDir::open(&config.state_dir)?;
        let registrations = Arc::new(Registrations::open(&state, limits.datasets)?);
        let origin_limits = OriginLimits {
            requests_max: limits.origin_requests,
            io_timeout: limits.origin_timeout(),
            ..OriginLimits::default()
        };
        let origins = Origins::new(config.origins.clone(), origin_limits).map_err(StartError::Origins)?;
        let allowed = Allowlist::new(origins, &config.local_dirs, config.auth_tokens.is_none());
        let versions = Versions::new(
            allowed,
            Arc::clone(&registrations),
            limits.tables_bytes,
            limits.versions,
            tasks.clone(),
        );
        let store_limits = StoreLimits {
            memory_bytes: limits.store_bytes(),
            deadline: limits.io_timeout,
            attempts: ATTEMPTS,
        };
        let read_permits = Arc::new(Semaphore::new(limits.requests));
        let disk = (config.cache.size != Amount::Bytes(0)).then(|| DiskTier::new(limits.append_bytes()));
        let store = Store::new(store_limits, disk, tasks.clone());
        let shares = Arc::new(Shares::default());
        let warmup_context = WarmupContext {
            store: Arc::clone(&store),
            shares: Arc::clone(&shares),
            versions: Arc::clone(&versions),
            read_permits: Arc::clone(&read_permits),
            read_permits_max: limits.requests,
            parallel: limits.batch_ahead().min(limits.origin_requests.div_ceil(4)),
        };
        let sweep = SweepContext {
            store: Arc::clone(&store),
            versions: Arc::clone(&versions),
            shares: Arc::clone(&shares),
            tasks: tasks.clone(),
            memory_bytes: limits.memory_bytes / 2,
            fetches_max: limits.origin_requests.div_ceil(2),
            fetch_bytes_max: limits.memory_bytes / 4,
            recorder: config.trace_dir.clone().map(|dir| Recorder::new(dir, limits.trace_bytes)),
            sweeps: AtomicUsize::new(0),
            counts: Default::default(),
        };
        let prefetch = PrefetchContext {
            store: Arc::clone(&store),
            versions: Arc::clone(&versions),
            tasks: tasks.clone(),
            pool: PrefetchPool::new(
                limits.prefetch_bytes,
                limits.origin_requests - limits.origin_requests / 4,
            ),
            lease_ttl: limits.lease_ttl,
        };
        let job_context = JobContext {
            sweep: Arc::new(sweep),
            prefetch: Arc::new(prefetch),
            tasks: tasks.clone(),
            lease_ttl: limits.lease_ttl,
            ledger_bytes: limits.ledger_bytes,
            job_ttl: limits.job_ttl,
            since: Instant::now(),
            counts: Default::default(),
        };
        let registry = Registry::open(state.path(), job_context).map_err(|error| StartError::Io {
            what: format!("open the jobs below {}", state.path().display()),
            error,
            hint: "check the permissions of --state-dir",
        })?;
        let request_memory = RequestMemory::new(limits.request_memory_bytes());
        let table = TableLimits {
            tcp: limits.connections,
            unix: limits.socket_connections,
            per_caller: limits.connections_per_caller,
            probes: PROBES_MAX,
        };
        Ok(Arc::new(Server {
            limits,
            auth,
            cache: config.cache.clone(),
            store,
            warmups: Warmups::new(warmup_context, tasks.clone()),
            shares,
            registry,
            access_changes: watch::Sender::new(()),
            versions,
            registrations,
            live_jobs: LiveJobs::new(limits.jobs, limits.job_ttl),
            accounts: Accounts::default(),
            requests: RequestMetrics::new(),
            read_permits,
            read_ahead: ReadAhead::new(limits.read_ahead_bytes()),
            tasks,
            connections: Connections::new(table, Arc::clone(&request_memory)),
            request_memory,
            addr,
            phase: AtomicU8::new(Phase::Starting as u8),
            started: Instant::now(),
            state,
        }))
    }

    /// Returns the configuration with which the disk tier is opened now.
    ///
    /// # Errors
    /// A text that says what is wrong with the directory's file system.
    pub fn disk_config(&self) -> Result<DiskConfig, String> {
        let CacheConfig { dir, size, free_floor, policy } = &self.cache;
        let mount_memory = MountMemory::new(dir, &self.state.path().join(CACHE_RECORDS));
        // Before the size: what is mounted below has another size.
        mount_memory.check().map_err(|e| e.to_string())?;
        let room = FsSpace::at(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        let size_max = size.of(room.available.saturating_add(room.own));
        if size_max < CACHE_MIN {
            let spare = ByteSize(room.available);
            return Err(format!(
                "cache.size = {size} of the {spare} free at {} is less than 16MiB",
                dir.display()
            ));
        }
        if size_max > room.total {
            let (size, total) = (ByteSize(size_max), ByteSize(room.total));
            tracing::warn!(
                %size, %total,
                "cache.size is more than the whole file system; cache.free_floor bounds the cache"
            );
        }
        Ok(DiskConfig {
            dir: dir.clone(),
            size_max,
            free_floor: free_floor.of(room.total),
            slab_bytes: None,
            policy: *policy,
            seed: rand::random(),
            files_max: SLABS_MAX,
            mount_memory: Some(mount_memory),
        })
    }

    /// Returns the phase.
    #[must_use]
    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Starting,
            1 => Phase::Ready,
            _ => Phase::Draining,
        }
    }

    /// Enters a phase. There is no way back to an earlier one.
    pub fn enter(&self, phase: Phase) {
        self.phase.fetch_max(phase as u8, Ordering::AcqRel);
        self.access_changes.send_replace(());
    }

    /// Returns the time since the start.
    #[must_use]
    pub fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// Returns the nanoseconds since the start.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        u64::try_from(self.uptime().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns the view of the cluster, which has this server as its only member.
    #[must_use]
    pub fn cluster(&self) -> Cluster {
        let id =
            nix::unistd::gethostname().map_or_else(|_| "server".to_owned(), |h| h.to_string_lossy().into());
        Cluster { view: 1, members: vec![Member { id, url: format!("http://{}", self.addr), weight: 1 }] }
    }

    /// Returns the tenants' quotas on disk, and the bytes that their datasets have there now.
    #[must_use]
    pub fn resident_quotas(&self) -> Vec<(Tenant, TenantQuota)> {
        let quotas: Vec<_> =
            self.auth.quotas().into_iter().filter_map(|(t, q)| Some((t, q.resident?))).collect();
        if quotas.is_empty() {
            return Vec::new();
        }
        let tier = self.store.disk().and_then(|d| d.engine()).map(|t| t.stats());
        let used: HashMap<_, _> =
            tier.iter().flat_map(|t| &t.datasets).map(|d| (d.dataset, d.bytes)).collect();
        let all = self.registrations.all();
        let of = |tenant: &Tenant| {
            let ids = all.iter().filter(|r| r.tenant == *tenant);
            ids.flat_map(|r| {
                let mut of = self.registry.sweeps_of(&r.domain, &r.dataset.name);
                of.push(DatasetId::of(&r.domain, &r.dataset.name));
                of
            })
            .map(|id| (id, used.get(&id).copied().unwrap_or(0)))
            .collect()
        };
        quotas.into_iter().map(|(t, quota)| (t.clone(), (quota, of(&t)))).collect()
    }

    /// Reloads the tokens file if it changed. Blocking.
    pub fn reload_tokens(&self) {
        if self.auth.reload() {
            // The quotas may have changed.
            self.shares.forget_applied();
            self.access_changes.send_replace(());
        }
    }

    /// Forgets jobs that were idle for too long, and moves their accounts to the job `expired`.
    pub fn expire_jobs(&self) {
        self.live_jobs.expire(self.now_ns());
        self.accounts.fold(|tenant, name| self.live_jobs.is_live(tenant, name));
    }
}

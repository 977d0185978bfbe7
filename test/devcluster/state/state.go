// SPDX-License-Identifier: Apache-2.0

// Package state is the directory of a cluster on the machine: the paths in it, the process that
// leads the cluster, and the lock for changes.
package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	"golang.org/x/sys/unix"
)

// DefaultRoot contains one directory per cluster. It is on disk, because images and logs may be
// large.
const DefaultRoot = "/var/lib/xpu-device-plugin/devcluster"

// Dir is the directory of one cluster. It belongs to root, mode 0700.
type Dir string

// Paths in a cluster's directory. The supervisor sees the same layout at another path.
func (d Dir) Record() string        { return d.join("cluster.json") }
func (d Dir) Kubeconfig() string    { return d.join("kubeconfig") }
func (d Dir) Socket() string        { return d.join("control.sock") }
func (d Dir) Logs() string          { return d.join("log") }
func (d Dir) PKI() string           { return d.join("pki") }
func (d Dir) Config() string        { return d.join("config") }
func (d Dir) Data() string          { return d.join("data") }
func (d Dir) Settings() string      { return d.join("settings") }
func (d Dir) Log(who string) string { return filepath.Join(d.Logs(), who+".log") }

// Node returns the directory of a node, whose disk survives restarts of the node.
func (d Dir) Node(name string) NodeDir { return NodeDir(d.join("nodes/" + name)) }

func (d Dir) join(name string) string { return filepath.Join(string(d), name) }

// NodeDir is the directory of one node.
type NodeDir string

// Paths in a node's directory.
func (d NodeDir) Config() string        { return d.join("node.json") }
func (d NodeDir) Socket() string        { return d.join("control.sock") }
func (d NodeDir) Disk() string          { return d.join("disk") }
func (d NodeDir) PKI() string           { return d.join("pki") }
func (d NodeDir) Settings() string      { return d.join("settings") }
func (d NodeDir) Provisioned() string   { return d.join("provisioned") }
func (d NodeDir) Logs() string          { return d.join("log") }
func (d NodeDir) Log(who string) string { return filepath.Join(d.Logs(), who+".log") }

func (d NodeDir) join(name string) string { return filepath.Join(string(d), name) }

// Record describes a cluster before its supervisor runs.
type Record struct {
	Name              string `json:"name"`
	KubernetesVersion string `json:"kubernetesVersion"`
	Nodes             int    `json:"nodes"`
	Multus            bool   `json:"multus"`     // the nodes' CNI plugin
	KubeProxy         bool   `json:"kubeProxy"`  // runs on the nodes
	API               string `json:"api"`        // URL of the API server on the machine's loopback
	Kubernetes        string `json:"kubernetes"` // directories of artifacts
	Runtime           string `json:"runtime"`
	CRIO              bool   `json:"crio"` // the container runtime
	Plugins           string `json:"plugins"`
	PauseImage        string `json:"pauseImage"` // file
	Leader            Leader `json:"leader"`
}

// Store manages the clusters below Root.
type Store struct{ Root string }

// ErrNone is returned for a cluster that does not exist.
var ErrNone = errors.New("no such cluster: start it with devcluster up")

// The name becomes part of the names of a control group and a directory.
var nameSyntax = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$`)

// Dir returns the directory of a cluster, which need not exist.
func (s Store) Dir(name string) (Dir, error) {
	if !nameSyntax.MatchString(name) {
		return "", fmt.Errorf("cluster name %q: want 1 to 32 lower-case letters, digits and "+
			"hyphens, a letter or digit first and last", name)
	}
	return Dir(filepath.Join(s.Root, name)), nil
}

// Names returns the names of existing clusters, running or not.
func (s Store) Names() ([]string, error) {
	entries, err := os.ReadDir(s.Root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}

	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}

	return names, nil
}

// Load reads the record of a started cluster.
func (s Store) Load(name string) (Dir, Record, error) {
	dir, err := s.Dir(name)
	if err != nil {
		return "", Record{}, err
	}

	record, err := ReadRecord(dir)
	if errors.Is(err, fs.ErrNotExist) {
		err = ErrNone
	}
	if err != nil {
		return "", Record{}, fmt.Errorf("cluster %s: %w", name, err)
	}

	return dir, record, nil
}

// ReadRecord reads the record in a directory.
func ReadRecord(dir Dir) (Record, error) {
	var record Record
	content, err := os.ReadFile(dir.Record())
	if err != nil {
		return Record{}, err
	}
	if err := json.Unmarshal(content, &record); err != nil {
		return Record{}, fmt.Errorf("%s: %w", dir.Record(), err)
	}
	return record, nil
}

// WriteRecord replaces the record in a directory atomically and durably.
func WriteRecord(dir Dir, record Record) error {
	content, err := json.MarshalIndent(record, "", "  ")
	if err != nil {
		return err
	}

	next := dir.Record() + ".next"
	f, err := os.OpenFile(next, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}

	_, err = f.Write(append(content, '\n'))
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}

	return os.Rename(next, dir.Record())
}

// Lock creates the cluster's directory if needed and locks it for starting or ending the cluster.
// The lock ends with the process, with unlock, or with the directory.
func (s Store) Lock(name string) (dir Dir, unlock func(), err error) {
	dir, err = s.Dir(name)
	if err != nil {
		return "", nil, err
	}
	if err := os.MkdirAll(string(dir), 0o700); err != nil {
		return "", nil, err
	}

	f, err := os.Open(string(dir))
	if err != nil {
		return "", nil, fmt.Errorf("cluster %s: lock: %w", name, err)
	}

	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return "", nil, fmt.Errorf("cluster %s: another devcluster up or down is at work on it",
				name)
		}
		return "", nil, fmt.Errorf("cluster %s: lock: %w", name, err)
	}

	if !same(f, string(dir)) {
		f.Close()
		return "", nil,
			fmt.Errorf("cluster %s: another devcluster down has just ended it: try again", name)
	}

	return dir, func() { f.Close() }, nil
}

// same reports whether path still refers to the open file.
func same(f *os.File, path string) bool {
	opened, err := f.Stat()
	if err != nil {
		return false
	}
	named, err := os.Stat(path)
	return err == nil && os.SameFile(opened, named)
}

// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// Endpoint is where an agent serves.
type Endpoint struct {
	// Network is "tcp" or "unix", and Address the address in it.
	Network, Address string
	// TLS is the configuration for the connection, with the client's certificate if the agent wants
	// one. Without it the connection is in plaintext.
	TLS *tls.Config
}

// ParseEndpoint returns the endpoint that a text names: "host:port", "unix:/path" or
// "unix:///path".
func ParseEndpoint(text string) (Endpoint, error) {
	if path, ok := strings.CutPrefix(text, "unix:"); ok {
		if strings.HasPrefix(path, "//") && !strings.HasPrefix(path, "///") {
			return Endpoint{}, fmt.Errorf("%q: must be unix:///path or unix:path", text)
		}
		path = strings.TrimPrefix(path, "//")
		if path == "" || len(path) > 107 { // sun_path in unix(7)
			return Endpoint{}, fmt.Errorf("%q: the path must have 1-107 bytes", text)
		}
		return Endpoint{Network: "unix", Address: path}, nil
	}

	host, port, err := net.SplitHostPort(text)
	if err != nil {
		return Endpoint{}, fmt.Errorf("%q: must be host:port or unix:path: %w", text, err)
	}
	if n, err := strconv.ParseUint(port, 10, 16); host == "" || err != nil || n == 0 {
		return Endpoint{}, fmt.Errorf("%q: must be host:port with a port of 1-65535", text)
	}

	return Endpoint{Network: "tcp", Address: text}, nil
}

// String is what [ParseEndpoint] parses.
func (e Endpoint) String() string {
	if e.Network == "unix" {
		return "unix:" + e.Address
	}
	return e.Address
}

// Connect opens a connection for raw bytes.
func (e Endpoint) Connect(ctx context.Context) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, e.Network, e.Address)
}

// Dial returns a gRPC connection with a TLS configuration, or in plaintext without one. It connects
// with the first call, and again soon after the agent was away.
func (e Endpoint) Dial(config *tls.Config) (*grpc.ClientConn, error) {
	creds := insecure.NewCredentials()
	if config != nil {
		creds = credentials.NewTLS(config)
	}
	authority := e.Address
	if e.Network == "unix" {
		authority = "localhost"
	}

	return grpc.NewClient("passthrough:///"+authority,
		grpc.WithTransportCredentials(creds),
		grpc.WithDisableServiceConfig(), grpc.WithNoProxy(),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return e.Connect(ctx)
		}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: 50 * time.Millisecond, Multiplier: 1.5, MaxDelay: 500 * time.Millisecond,
			},
			MinConnectTimeout: 5 * time.Second,
		}))
}

// Port is a bridge port that a run may make: its id, and the MAC address of its interface.
type Port struct {
	ID string
	// MAC is nil if the run may choose any.
	MAC net.HardwareAddr
}

// ParsePort parses "id" or "id=MAC".
func ParsePort(text string) (Port, error) {
	id, mac, has := strings.Cut(text, "=")
	if !idForm.MatchString(id) {
		return Port{}, fmt.Errorf("%q: the id must be 4-63 characters of a-z, 0-9 and '-', and "+
			"begin with a letter", text)
	}
	if !has {
		return Port{ID: id}, nil
	}

	address, err := net.ParseMAC(mac)
	if err != nil || len(address) != 6 || address[0]&1 != 0 {
		return Port{}, fmt.Errorf("%q: after '=' must be a unicast MAC address", text)
	}
	return Port{ID: id, MAC: address}, nil
}

// idForm is the form of ids: 4-63 characters of a-z, 0-9 and '-' by the API's comments, beginning
// with a letter and not ending with '-' by AIP-122.
var idForm = regexp.MustCompile(`^[a-z][a-z0-9-]{2,61}[a-z0-9]$`)

// Range is a range of numbers, both included.
type Range struct{ First, Last uint32 }

// ParseRange parses "first-last", whose numbers must be in the limits, with at least some numbers.
func ParseRange(text string, limits Range, least int) (Range, error) {
	first, last, _ := strings.Cut(text, "-")
	a, errA := strconv.ParseUint(first, 10, 32)
	b, errB := strconv.ParseUint(last, 10, 32)
	r := Range{uint32(a), uint32(b)}
	if errA != nil || errB != nil || r.First < limits.First || r.Last > limits.Last ||
		r.size() < least {
		return r, fmt.Errorf("%q: must be first-last in %d-%d, with at least %d numbers", text,
			limits.First, limits.Last, least)
	}
	return r, nil
}

func (r Range) size() int { return int(r.Last) - int(r.First) + 1 }

// Ending says how the process of an agent is to end.
type Ending string

// The endings are signals.
const (
	Terminated Ending = "TERM"
	Killed     Ending = "KILL"
)

// Hooks do at the xPU what OPI's API cannot. A hook that is nil is missing.
type Hooks struct {
	// MakePort makes the interface that a port needs to be up. It succeeds if there is one.
	MakePort func(context.Context, Port) error
	// RemovePort removes the interface that MakePort made. It succeeds if there is none.
	RemovePort func(context.Context, Port) error
	// OpenWire returns the interface of a port as a pod has it. The interface exists and is to be
	// set up.
	OpenWire func(context.Context, Port) (Wire, error)
	// Restart ends the agent's process and starts the agent again. It may return before the agent
	// answers.
	Restart func(context.Context, Ending) error
}

// Config configures a run.
type Config struct {
	Endpoint Endpoint
	Hooks    Hooks
	// Ports are the ports that the run may make. Without any, it chooses ids itself.
	Ports []Port
	// LogicalBridges are names of logical bridges for ports at agents that serve no
	// LogicalBridgeService, in the form that the agent takes.
	LogicalBridges []string
	// Prefix begins all ids that the run chooses: 4-8 characters. See [NewPrefix].
	Prefix string
	// VLANs and VNIs are those that the run may use. It leaves out what it finds in use.
	VLANs, VNIs Range
	// VTEP is an address of the xPU for VXLAN tunnels, or zero if it is not known.
	VTEP netip.Prefix
	// Settle is how long the agent may take until an object is up or gone.
	Settle time.Duration
	// CallTimeout is how long a call may take.
	CallTimeout time.Duration
	// Limit is how long the run may take, without its clean-up.
	Limit time.Duration
	// Scale is how many objects the cases of [Scale] make.
	Scale int
	// Declared are the profiles that the vendor claims. What they need and the agent does not serve
	// is a failure.
	Declared []Profile
}

// NewPrefix returns a prefix of ids that no other run has, but for chance (1 of 65536).
func NewPrefix() string { return "oc" + hex.EncodeToString(random(2)) }

func random(n int) []byte {
	bytes := make([]byte, n)
	for i := range bytes {
		bytes[i] = byte(rand.Uint32())
	}
	return bytes
}

// Check returns what is wrong with a configuration.
func (c Config) Check() error {
	var errs []error
	if !regexp.MustCompile(`^[a-z][a-z0-9]{3,7}$`).MatchString(c.Prefix) {
		errs = append(errs, fmt.Errorf("prefix %q: must be 4-8 characters of a-z and 0-9, and "+
			"begin with a letter", c.Prefix))
	}
	if c.Settle <= 0 || c.CallTimeout <= 0 || c.Limit <= 0 {
		errs = append(errs, errors.New("durations must be positive"))
	}
	if c.Scale < 1 || c.Scale > 1000 {
		errs = append(errs, fmt.Errorf("scale %d: must be 1-1000", c.Scale))
	}

	for _, p := range c.Declared {
		if !slices.Contains(Profiles(), p) {
			errs = append(errs, fmt.Errorf("profile %q: must be one of %v", p, Profiles()))
		}
	}

	seen := map[string]bool{}
	for _, p := range c.Ports {
		if seen[p.ID] {
			errs = append(errs, fmt.Errorf("port %s: is given twice", p.ID))
		}
		seen[p.ID] = true
	}

	return errors.Join(errs...)
}

package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
)

// killAfter is how long an IPAM plugin that was told to end has before it is killed. Told first, because one that is
// killed while it writes its files may leave an address that belongs to nobody.
const killAfter = 5 * time.Second

// delegate runs the IPAM plugin of a configuration by section 4 of the CNI specification. Without one it does nothing.
//
// It is not package invoke of containernetworking/cni because that brings OpenTelemetry and net/http with it, a third
// of the shim's size, and because it waits without limit for a plugin whose children hold its output open.
type delegate struct {
	config config
	args   *skel.CmdArgs
	stderr io.Writer
}

// add has the IPAM plugin give addresses: its result in the version of the configuration, nil without a plugin. On an
// error the plugin may have reserved something.
func (d delegate) add(ctx context.Context) (json.RawMessage, error) {
	if d.config.IPAM.none() {
		return nil, nil
	}
	output, err := d.run(ctx, "ADD")
	if err != nil {
		return nil, err
	}
	given, err := addressesOf(output, d.config.CNIVersion)
	if err != nil {
		return nil, types.NewError(types.ErrInvalidNetworkConfig, d.name(), err.Error())
	}
	return given, nil
}

// addressesOf is what an IPAM plugin printed, in a version of the specification.
func addressesOf(output []byte, version string) (json.RawMessage, error) {
	result, err := DecodeResult(output, version)
	if err != nil {
		return nil, fmt.Errorf("its result: %w", err)
	}
	n, err := addresses(result)
	if err != nil {
		return nil, fmt.Errorf("its result: %w", err)
	}
	if n == 0 {
		return nil, errors.New("it gave no address; without a need for addresses, leave ipam out")
	}
	if result, err = result.GetAsVersion(version); err != nil {
		return nil, fmt.Errorf("its result: %w", err)
	}
	return json.Marshal(result)
}

// tell has the IPAM plugin do a command that has no result.
func (d delegate) tell(ctx context.Context, command string) error {
	if d.config.IPAM.none() {
		return nil
	}
	_, err := d.run(ctx, command)
	return err
}

// run executes the IPAM plugin and returns what it printed. The error is a [types.Error], with the plugin's code where
// it gave one.
func (d delegate) run(ctx context.Context, command string) ([]byte, error) {
	path, err := d.find()
	if err != nil {
		return nil, err
	}
	var stdout, stderr bytes.Buffer
	plugin := exec.CommandContext(ctx, path)
	plugin.Env = append(os.Environ(),
		"CNI_COMMAND="+command,
		"CNI_CONTAINERID="+d.args.ContainerID,
		"CNI_NETNS="+d.args.Netns,
		"CNI_IFNAME="+d.args.IfName,
		"CNI_ARGS="+d.args.Args,
		"CNI_PATH="+d.args.Path,
	)
	plugin.Stdin = bytes.NewReader(d.args.StdinData)
	plugin.Stdout, plugin.Stderr = &stdout, io.MultiWriter(&stderr, d.stderr)
	plugin.Cancel = func() error { return plugin.Process.Signal(syscall.SIGTERM) }
	plugin.WaitDelay = killAfter
	err = plugin.Run()
	if err == nil {
		return stdout.Bytes(), nil
	}
	if ctx.Err() != nil {
		return nil, types.NewError(types.ErrTryAgainLater, d.name(), command+" took too long")
	}
	return nil, d.failure(err, stdout.Bytes(), stderr.Bytes())
}

// find looks for the plugin in the directories of CNI_PATH.
func (d delegate) find() (string, error) {
	for _, dir := range filepath.SplitList(d.args.Path) {
		path := filepath.Join(dir, d.config.IPAM.Type)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			return path, nil
		}
	}
	return "", types.NewError(types.ErrInvalidNetworkConfig, d.name(),
		fmt.Sprintf("ipam.type: there is no such file in CNI_PATH (%s)", d.args.Path))
}

// failure is the error that a plugin printed, or what is known without that.
func (d delegate) failure(err error, stdout, stderr []byte) error {
	var said types.Error
	if json.Unmarshal(stdout, &said) == nil && said.Msg != "" {
		if said.Code == types.ErrUnknown {
			said.Code = types.ErrInternal
		}
		return types.NewError(said.Code, d.name(), said.Error())
	}
	return types.NewError(types.ErrInternal, d.name(), fmt.Sprintf("%v: %s", err, bytes.TrimSpace(stderr)))
}

func (d delegate) name() string { return "IPAM plugin " + d.config.IPAM.Type }

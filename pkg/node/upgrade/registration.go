// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	metadatav1alpha1 "k8s.io/dynamic-resource-allocation/api/metadata/v1alpha1"
	metadatav1beta1 "k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/peer"
)

const (
	// answerTime is how long the library may take to write metadata files and to answer after a
	// method of the driver has returned. There is no event to wait for, because the library accepts
	// no stats handler, and its Stop aborts calls (grpc.Server.Stop).
	answerTime = 100 * time.Millisecond
	// registerPatience is how long a successor waits for the kubelet to register its DRA driver
	// before it asks for the node.
	registerPatience = 5 * time.Second
)

// RegisterOptions are the options of [Register]. All fields except PodUID must be set.
type RegisterOptions struct {
	Client kubernetes.Interface
	Node   string
	// PodUID makes the names of the sockets unique, so that two agents can run at once. It is empty
	// where only one agent is started at a time.
	PodUID string
	// KubeletDir is the kubelet's directory, and CDIDir the directory of CDI files.
	KubeletDir, CDIDir string
	// Files are how the library writes its files to CDIDir and to its own directory.
	Files kubeletplugin.MetadataFileOperations
	Log   logr.Logger
}

// Registration makes the DRA driver known to the kubelet as soon as the process starts. Calls wait
// until the agent has the node.
type Registration struct {
	gate   *gate
	helper *kubeletplugin.Helper
	// registered is closed when the kubelet has registered the driver.
	registered chan struct{}
	registers  sync.Once // closes registered
	closing    sync.Once
}

// Register makes the driver known to the kubelet.
func Register(ctx context.Context, options RegisterOptions) (*Registration, error) {
	log, data := options.Log, DriverDir(options.KubeletDir)
	if err := os.MkdirAll(data, 0o750); err != nil {
		return nil, fmt.Errorf("DRA driver: %w", err)
	}

	registrars := filepath.Join(options.KubeletDir, "plugins_registry")
	// The kubelet would try the sockets of killed pods again and again.
	err := errors.Join(peer.RemoveDead(filepath.Join(registrars, v1alpha1.GroupName+"*.sock")),
		peer.RemoveDead(filepath.Join(data, "*.sock")))
	if err != nil {
		log.Error(err, "A socket that nobody serves remains")
	}

	r := &Registration{gate: newGate(), registered: make(chan struct{})}
	// The context does not end with the process's context, so that running calls can finish.
	r.helper, err = kubeletplugin.Start(logr.NewContext(context.WithoutCancel(ctx), log), r.gate,
		kubeletplugin.DriverName(v1alpha1.GroupName),
		kubeletplugin.NodeName(options.Node),
		kubeletplugin.KubeClient(options.Client),
		kubeletplugin.PluginDataDirectoryPath(data),
		kubeletplugin.RegistrarDirectoryPath(registrars),
		// Two pods of the DaemonSet may run at once during an update.
		kubeletplugin.RollingUpdate(types.UID(options.PodUID)),
		kubeletplugin.GRPCInterceptor(r.intercept),
		kubeletplugin.EnableDeviceMetadata(true, []schema.GroupVersion{
			metadatav1beta1.SchemeGroupVersion, metadatav1alpha1.SchemeGroupVersion,
		}),
		kubeletplugin.CDIDirectory(options.CDIDir),
		kubeletplugin.MetadataFileOps(options.Files),
		// A Prepare waits for its xPU and must not delay others. Each Function has a lock.
		kubeletplugin.Serialize(false),
	)

	if err != nil {
		return nil, fmt.Errorf("DRA driver: %w", err)
	}

	return r, nil
}

// DriverDir returns the driver's directory in the kubelet's directory of plugins.
func DriverDir(kubeletDir string) string {
	return filepath.Join(kubeletDir, "plugins", v1alpha1.GroupName)
}

// intercept closes registered when the kubelet has registered the driver.
func (r *Registration) intercept(
	ctx context.Context, request any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
) (any, error) {
	response, err := handle(ctx, request)
	if status, ok := request.(*registerapi.RegistrationStatus); ok && status.PluginRegistered {
		// when a kubelet replaces another one, both may call at once
		r.registers.Do(func() { close(r.registered) })
	}
	return response, err
}

// Await returns when the kubelet has registered the driver, after patience, or when ctx ends. A
// patience of 0 stands for 5 s.
func (r *Registration) Await(ctx context.Context, patience time.Duration) {
	select {
	case <-r.registered:
	case <-time.After(cmp.Or(patience, registerPatience)):
	case <-ctx.Done():
	}
}

// Open lets the kubelet's calls through to the driver, because the agent has the node. It must be
// called at most once.
func (r *Registration) Open(driver kubeletplugin.DRAPlugin) { r.gate.open(driver) }

// Close lets the running calls finish, for 2 s at most, and deregisters the driver from the
// kubelet. It may be called again.
func (r *Registration) Close() {
	r.closing.Do(func() {
		r.gate.close()
		time.Sleep(answerTime)
		r.helper.Stop()
	})
}
